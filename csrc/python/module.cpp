// SPDX-License-Identifier: Apache-2.0
// Everything cold of the Python face. Bindings only forward; megagraph/_C.pyi is their manual.

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bank/chunk.h"
#include "csrc/bank/cuda_capture.h"
#include "csrc/bank/executable.h"
#include "csrc/bank/graph_bank.h"
#include "csrc/bank/main_grad_node.h"
#include "csrc/bank/op_trace.h"
#include "csrc/python/accumulator_hooks.h"
#include "csrc/python/fingerprint.h"
#include "csrc/python/site_object.h"

namespace py = pybind11;

namespace megagraph {
namespace {

// An Executable on its way from its capture to its site.
struct ExecutableHandle {
  std::unique_ptr<Executable> executable;
};

// Errors of `body` cross autograd threads as torch's own python_error.
ExecutableHandle make_host_executable_of(py::function body) {
  const auto held =
      std::shared_ptr<py::function>(new py::function(std::move(body)), [](py::function* f) {
        const py::gil_scoped_acquire gil;
        delete f;
      });
  return {make_host_executable([held] {
    const py::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (py::error_already_set& error) {
      error.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  })};
}

std::unique_ptr<Executable> take(ExecutableHandle* handle) {
  return handle == nullptr ? nullptr : std::move(handle->executable);
}

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

std::vector<at::Tensor> or_undefined(const OptionalTensors& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& t : tensors) result.push_back(t.value_or(at::Tensor()));
  return result;
}

void set_graph(Chunk& chunk, int rank, int variant, int slot, ExecutableHandle* forward,
               ExecutableHandle* backward, std::vector<at::Tensor> inputs, bool fewer_rows,
               std::vector<at::Tensor> outputs, const OptionalTensors& grad_outputs,
               const OptionalTensors& grad_inputs, std::vector<at::Tensor> params,
               std::vector<at::Tensor> param_grads, std::vector<at::Tensor> reads,
               const std::string& range) {
  auto graph = std::make_shared<SiteGraph>();
  graph->forward = take(forward);
  graph->backward = take(backward);
  graph->grad_outputs = or_undefined(grad_outputs);
  graph->grad_inputs = or_undefined(grad_inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool has_gradient = i < graph->grad_inputs.size() && graph->grad_inputs[i].defined();
    graph->accepts.push_back(TensorSignature::of(inputs[i], has_gradient, fewer_rows && i == 0));
  }
  graph->inputs = std::move(inputs);
  graph->outputs = std::move(outputs);
  graph->params = std::move(params);
  graph->param_grads = std::move(param_grads);
  graph->reads = std::move(reads);
  if (!range.empty()) {
    graph->forward_range = range + " forward";
    graph->backward_range = range + " backward";
  }
  chunk.site(rank).set_graph(variant, slot, std::move(graph));
}

// The cudaGraphExec_t of each captured site, forward and backward, by rank.
std::pair<std::vector<uint64_t>, std::vector<uint64_t>> raw_graph_execs(Chunk& chunk, int variant,
                                                                        int slot) {
  std::vector<uint64_t> forward, backward;
  for (int rank = 0; rank < chunk.num_sites(); ++rank) {
    const SiteGraph* graph = chunk.site(rank).graph(variant, slot);
    if (graph == nullptr) continue;
    forward.push_back(reinterpret_cast<uint64_t>(graph->forward->raw()));
    if (graph->backward) backward.push_back(reinterpret_cast<uint64_t>(graph->backward->raw()));
  }
  return {forward, backward};
}

void set_listener(Chunk& chunk, std::function<bool()> wants, std::function<void(int)> done) {
  chunk.set_listener(std::make_shared<const GradientListener>(
      GradientListener{std::move(wants), std::move(done)}));
}

// Same memory, owned by somebody else: what a graph's boundary in a pool is.
at::Tensor unowned_alias(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().requires_grad(false));
}

std::map<std::string, int64_t> counters_of(GraphBank& bank) {
  std::map<std::string, int64_t> result;
  const Counters& counters = bank.counters();
  result["calls"] = counters.calls.load();
  result["replays"] = counters.replays.load();
  for (size_t i = 0; i < kEagerReasonNames.size(); ++i) {
    result[kEagerReasonNames[i]] = counters.eager[i].load();
  }
  return result;
}

// Only a CUDA build has pools to keep alive.
#ifdef MEGAGRAPH_WITH_CUDA
using Pools = std::vector<std::shared_ptr<PoolHold>>;
#else
using Pools = std::vector<std::shared_ptr<Slot>>;
#endif

void set_slots(Chunk& chunk, int num_slots, const Pools& pools, bool poison,
               bool holds_collectives) {
  TORCH_CHECK_VALUE(num_slots >= 1, "a chunk needs at least one slot, got ", num_slots);
  std::vector<std::shared_ptr<void>> held(pools.begin(), pools.end());
  if (held.empty()) held.resize(num_slots);
  chunk.set_slots(num_slots, held, poison, holds_collectives);
}

// A call on a run of sites; without its last one, on one site.
template <typename Result>
auto of_run(Result (Slot::*call)(int, int)) {
  return [call](Slot& slot, int first, std::optional<int> last) {
    return (slot.*call)(first, last.value_or(first));
  };
}

void bind_slot(py::module_& m) {
  py::enum_<LeaseKind>(m, "LeaseKind")
      .value("OUTPUT", LeaseKind::kOutput)
      .value("GRADIENT", LeaseKind::kGradient);
  py::class_<Slot, std::shared_ptr<Slot>>(m, "Slot")
      .def(py::init([](int index, int num_sites) {
             return std::make_shared<Slot>(index, num_sites, nullptr, nullptr);
           }),
           py::arg("index"), py::arg("num_sites"))
      .def("lease", &Slot::lease, py::arg("variant"), py::arg("training"))
      .def("end_micro_batch", &Slot::end_micro_batch)
      .def("enter", of_run(&Slot::enter), py::arg("first"), py::arg("last") = py::none())
      .def("leave", of_run(&Slot::leave), py::arg("first"), py::arg("last") = py::none())
      .def("drop", of_run(&Slot::drop), py::arg("first"), py::arg("last") = py::none())
      .def("node_done", of_run(&Slot::node_done), py::arg("first"), py::arg("last") = py::none())
      .def("retain_tensor", &Slot::retain_tensor, py::arg("rank"),
           py::arg("kind") = LeaseKind::kOutput)
      .def("release_tensor", &Slot::release_tensor, py::arg("rank"),
           py::arg("kind") = LeaseKind::kOutput)
      .def_property_readonly("is_free", &Slot::is_free)
      .def("describe_holders", &Slot::describe_holders);
}

void bind_bank(py::module_& m) {
  py::enum_<BankState>(m, "BankState")
      .value("WARM_UP", BankState::kWarmUp)
      .value("CAPTURING", BankState::kCapturing)
      .value("SEALED", BankState::kSealed)
      .value("SUSPENDED", BankState::kSuspended)
      .value("RELEASED", BankState::kReleased);
  py::class_<GraphBank, std::shared_ptr<GraphBank>>(m, "GraphBank")
      .def(py::init<c10::Device>(), py::arg("device"))
      .def_property_readonly("state", &GraphBank::state)
      .def("become", &GraphBank::become, py::arg("state"))
      .def("add_chunk", &GraphBank::add_chunk, py::arg("num_sites"))
      .def(
          "count_eager",
          [](GraphBank& bank, int reason, int64_t calls) {
            bank.counters().count_eager(static_cast<EagerReason>(reason), calls);
          },
          py::arg("reason"), py::arg("calls"))
      .def("counters", &counters_of)
      .def("release", &GraphBank::release, py::call_guard<py::gil_scoped_release>());
}

void bind_chunk(py::module_& m) {
  py::enum_<SegmentKind>(m, "SegmentKind")
      .value("COPY", SegmentKind::kCopy)
      .value("OFFSETS", SegmentKind::kOffsets)
      .value("MASK", SegmentKind::kMask)
      .value("COUNT", SegmentKind::kCount);
  py::class_<MetadataBuffer>(m, "MetadataBuffer")
      .def(py::init([](SegmentKind kind, std::vector<at::Tensor> by_slot, int source, int fill,
                       bool extend_last) {
             return MetadataBuffer{kind, std::move(by_slot), source, fill, extend_last};
           }),
           py::arg("kind"), py::arg("by_slot"), py::arg("source"), py::arg("fill"),
           py::arg("extend_last"));
  py::class_<Chunk, std::shared_ptr<Chunk>>(m, "Chunk")
      .def_property_readonly("num_sites", &Chunk::num_sites)
      .def_property_readonly("num_slots", &Chunk::num_slots)
      .def_property_readonly("num_variants", &Chunk::num_variants)
      .def_property_readonly("is_running",
                             [](const Chunk& chunk) { return chunk.current() != nullptr; })
      .def_property_readonly(
          "slot_index",
          [](const Chunk& chunk) { return chunk.current() ? chunk.current()->index() : -1; })
      .def(
          "site",
          [](const std::shared_ptr<Chunk>& chunk, int rank) {
            return py::reinterpret_steal<py::object>(make_site_object(chunk, rank));
          },
          py::arg("rank"))
      .def("run",
           [](const std::shared_ptr<Chunk>& chunk) {
             return py::reinterpret_steal<py::object>(make_run_object(chunk));
           })
      .def(
          "set_site_eager_reason",
          [](Chunk& chunk, int rank, int reason) {
            chunk.site(rank).set_eager_reason(static_cast<EagerReason>(reason));
          },
          py::arg("rank"), py::arg("reason"))
      .def("set_slots", &set_slots, py::arg("num_slots"), py::arg("pools"), py::arg("poison"),
           py::arg("holds_collectives"))
      .def(
          "add_variant",
          [](Chunk& chunk, bool training, std::vector<MetadataBuffer> metadata, int end_source) {
            return chunk.add_variant({training, NumericSettings::current(chunk.device().type()),
                                      std::move(metadata), end_source});
          },
          py::arg("training"), py::arg("metadata"), py::arg("end_source"))
      .def("set_graph", &set_graph, py::kw_only(), py::arg("rank"), py::arg("variant"),
           py::arg("slot"), py::arg("forward"), py::arg("backward"), py::arg("inputs"),
           py::arg("fewer_rows"), py::arg("outputs"), py::arg("grad_outputs"),
           py::arg("grad_inputs"), py::arg("params"), py::arg("param_grads"), py::arg("reads"),
           py::arg("range") = "")
      .def("raw_graph_execs", &raw_graph_execs, py::arg("variant"), py::arg("slot"))
      .def("num_document_grids", &Chunk::num_document_grids, py::arg("variant"), py::arg("slot"))
      .def("set_listener", &set_listener, py::arg("wants"), py::arg("done"))
      .def(
          "begin",
          [](Chunk& chunk, int variant, const std::vector<at::Tensor>& sources) {
            const auto reason = chunk.begin(variant, sources);
            return reason ? static_cast<int>(*reason) : -1;
          },
          py::arg("variant"), py::arg("sources"))
      .def("end", &Chunk::end)
      .def("all_free", &Chunk::all_free)
      .def("describe_holders", &Chunk::describe_holders)
      .def(
          "changed_setting",
          [](const Chunk& chunk, int variant) {
            return chunk.variant(variant).numerics.difference(
                NumericSettings::current(chunk.device().type()));
          },
          py::arg("variant"));
}

void bind_capture(py::module_& m) {
  py::class_<ExecutableHandle>(m, "Executable")
      .def_property_readonly("num_nodes", [](const ExecutableHandle& handle) {
        return handle.executable == nullptr ? 0 : handle.executable->num_nodes();
      });
  m.def("make_host_executable", &make_host_executable_of, py::arg("body"));

  using Target =
      std::tuple<at::Tensor, std::optional<at::Tensor>, std::optional<std::function<bool()>>>;
  py::class_<AccumulatorSwap>(m, "AccumulatorSwap")
      .def(py::init([](std::vector<Target> targets) {
             std::vector<GradTarget> swapped;
             for (auto& [param, main_grad, already_added] : targets) {
               swapped.push_back(
                   {param, main_grad.value_or(at::Tensor()), already_added.value_or(nullptr)});
             }
             return std::make_unique<AccumulatorSwap>(std::move(swapped));
           }),
           py::arg("targets"))
      .def("install", &AccumulatorSwap::install)
      .def("join", &AccumulatorSwap::join)
      .def("restore", &AccumulatorSwap::restore)
      .def("take_kept_grads", [](AccumulatorSwap& swap) {
        OptionalTensors grads;
        for (at::Tensor& grad : swap.take_kept_grads()) {
          grads.push_back(grad.defined() ? std::make_optional(std::move(grad)) : std::nullopt);
        }
        return grads;
      });
  m.def("count_accumulator_hooks", &count_accumulator_hooks, py::arg("param"));
  m.def("fingerprint", &fingerprint, py::arg("tensors"));
  m.def("module_fingerprint", &module_fingerprint, py::arg("modules"));
  m.def("unowned_alias", &unowned_alias, py::arg("tensor"));
  py::class_<OpTrace>(m, "OpTrace")
      .def(py::init<>())
      .def_property_readonly("last_op", &OpTrace::last_op);
}

#ifdef MEGAGRAPH_WITH_CUDA
void bind_cuda(py::module_& m) {
  py::class_<PoolHold, std::shared_ptr<PoolHold>>(m, "PoolHold")
      .def(py::init<c10::DeviceIndex, std::pair<uint64_t, uint64_t>>(), py::arg("device_index"),
           py::arg("pool"));
  py::class_<CudaCapture>(m, "CudaCapture")
      .def(py::init<std::pair<uint64_t, uint64_t>, const std::vector<at::Generator>&>(),
           py::arg("pool"), py::arg("generators"))
      .def("begin", &CudaCapture::begin, py::call_guard<py::gil_scoped_release>())
      .def("end",
           [](CudaCapture& capture) {
             const py::gil_scoped_release no_gil;
             return ExecutableHandle{capture.end()};
           })
      .def("abort", &CudaCapture::abort, py::call_guard<py::gil_scoped_release>());
  m.def("capture_stream", &capture_stream, py::arg("device_index"));
}
#endif

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("EAGER_REASON_NAMES") =
      std::vector<std::string>(kEagerReasonNames.begin(), kEagerReasonNames.end());
  PyObject* site = make_site_type();
  if (site == nullptr) throw py::error_already_set();
  m.attr("Site") = py::reinterpret_steal<py::object>(site);
  bind_slot(m);
  bind_bank(m);
  bind_chunk(m);
  bind_capture(m);
#ifdef MEGAGRAPH_WITH_CUDA
  m.attr("WITH_CUDA") = true;
  bind_cuda(m);
#else
  m.attr("WITH_CUDA") = false;
#endif
}

}  // namespace megagraph
