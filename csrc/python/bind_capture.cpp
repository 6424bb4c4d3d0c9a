// SPDX-License-Identifier: Apache-2.0
// Captures, and what is swapped and watched meanwhile.

#include <array>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "csrc/bank/capture/capture_edges.h"
#include "csrc/bank/capture/main_grad_node.h"
#include "csrc/bank/capture/op_trace.h"
#include "csrc/bank/capture/read_trace.h"
#include "csrc/python/argument_values.h"
#include "csrc/python/bindings.h"
#include "csrc/torch/python_errors.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include "csrc/bank/capture/cuda_capture.h"
#include "csrc/torch/graph_pool.h"
#endif

namespace py = pybind11;

namespace megagraph {
namespace {

// Errors of `body` cross autograd threads as torch's own python_error.
ExecutableHandle make_host_executable(py::function body) {
  const auto held =
      std::shared_ptr<py::function>(new py::function(std::move(body)), [](py::function* f) {
        const py::gil_scoped_acquire gil;
        delete f;
      });
  return {std::make_unique<HostExecutable>([held] {
    const py::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (py::error_already_set& error) {
      error.restore();
      throw_python_error();
    }
  })};
}

// Puts the accumulators back, even if joining what ran beside them fails.
struct SwapEnd {
  explicit SwapEnd(AccumulatorSwap& ending) : swap(ending) {}
  ~SwapEnd() { swap.restore(); }
  SwapEnd(const SwapEnd&) = delete;
  SwapEnd& operator=(const SwapEnd&) = delete;
  AccumulatorSwap& swap;
};

// Megatron has one flag for all threads, which it asks whether it is captured. This is true on
// those alone that are inside of it: DDP's hooks on another one add up gradients.
struct CapturingThread {
  static int& depth() {
    thread_local int depth = 0;
    return depth;
  }
};

void bind_capturing_thread(py::module_& m) {
  py::class_<CapturingThread>(m, "CapturingThread")
      .def(py::init<>())
      .def("__enter__",
           [](py::object self) {
             ++CapturingThread::depth();
             return self;
           })
      .def("__exit__", [](const CapturingThread&, const py::args&) { --CapturingThread::depth(); })
      .def("__bool__", [](const CapturingThread&) { return CapturingThread::depth() > 0; });
}

void bind_edges(py::module_& m) {
  py::class_<CaptureEdges>(m, "CaptureEdges")
      .def(py::init([](std::map<int, std::set<size_t>> transient, std::set<int> gaps,
                       std::vector<int64_t> shape, at::ScalarType dtype, at::Device device) {
             return std::make_unique<CaptureEdges>(std::move(transient), std::move(gaps),
                                                   std::move(shape),
                                                   at::TensorOptions(dtype).device(device));
           }),
           py::kw_only(), py::arg("transient"), py::arg("gaps"), py::arg("shape"), py::arg("dtype"),
           py::arg("device"))
      .def("is_entry", &CaptureEdges::is_entry, py::arg("site"))
      .def("input", &CaptureEdges::input, py::arg("site"))
      .def("keep_outputs", &CaptureEdges::keep_outputs, py::arg("site"), py::arg("outputs"))
      .def(
          "output_grads",
          [](CaptureEdges& edges, int site, const std::vector<bool>& has_grad) {
            return or_none(edges.output_grads(site, has_grad));
          },
          py::arg("site"), py::arg("has_grad"))
      .def("keep_input_grad", &CaptureEdges::keep_input_grad, py::arg("site"), py::arg("grad"))
      .def("keep_param_grads", &CaptureEdges::keep_param_grads, py::arg("site"), py::arg("arrived"))
      .def("give_back_outputs", &CaptureEdges::give_back_outputs, py::arg("site"))
      .def("give_back_gradients", &CaptureEdges::give_back_gradients, py::arg("site"))
      .def("disown", &CaptureEdges::disown)
      .def(
          "graph",
          [](const CaptureEdges& edges, int site, ExecutableHandle& forward,
             ExecutableHandle* backward, ExecutableHandle* finish,
             std::vector<at::Tensor> accumulated) {
            std::shared_ptr<SiteGraph> graph = edges.graph(site);
            graph->forward = std::move(forward.executable);
            if (backward != nullptr) graph->backward = std::move(backward->executable);
            if (finish != nullptr) graph->finish = std::move(finish->executable);
            graph->accumulated = std::move(accumulated);
            return graph;
          },
          py::arg("site"), py::kw_only(), py::arg("forward"), py::arg("backward"),
          py::arg("finish"), py::arg("accumulated"));
}

#ifdef MEGAGRAPH_WITH_CUDA
void bind_cuda(py::module_& m) {
  py::class_<PoolHold, std::shared_ptr<PoolHold>>(m, "PoolHold")
      .def(py::init<c10::DeviceIndex, c10::MempoolId_t>(), py::arg("device_index"), py::arg("pool"))
      .def_property_readonly("pool", &PoolHold::pool);
  py::class_<PassMemory, std::shared_ptr<PassMemory>>(m, "PassMemory").def(py::init<>());
  py::class_<SlotMemory, std::shared_ptr<SlotMemory>>(m, "SlotMemory")
      .def(py::init<>())
      .def_property_readonly("is_known", &SlotMemory::is_known)
      .def("of", &SlotMemory::of, py::arg("site"), py::arg("number"))
      .def("needs", &SlotMemory::needs, py::arg("own"), py::arg("lent"), py::arg("kept_in"),
           py::arg("scratch"));
  m.def("reserve", &reserve, py::arg("device_index"), py::arg("pool"), py::arg("num_bytes"));
  m.def(
      "capture_work",
      [](const std::array<c10::MempoolId_t, 3>& pools, const std::vector<at::Generator>& generators,
         std::shared_ptr<PoolHold> scratch, std::shared_ptr<PassMemory> memory,
         const std::function<void()>& body, const std::function<void()>& give_back) {
        const auto& [own, lent, freed] = pools;
        return ExecutableHandle{capture_work({own, lent, freed}, generators, std::move(scratch),
                                             std::move(memory), body, give_back)};
      },
      py::arg("pools"), py::arg("generators"), py::arg("scratch"), py::arg("memory"),
      py::arg("body"), py::arg("give_back"), py::call_guard<py::gil_scoped_release>());
  m.def("capture_stream", &capture_stream, py::arg("device_index"));
  py::class_<PoolNote>(m, "PoolNote");
  m.def("take_note", &take_note, py::arg("device_index"), py::arg("pool"));
  m.def("held_bytes", &held_bytes, py::arg("pool"));
  m.def("taken_bytes", &taken_bytes, py::arg("pool"));
  py::class_<PoolLoan>(m, "PoolLoan")
      .def(py::init<c10::DeviceIndex, c10::MempoolId_t, const PoolNote&>(), py::arg("device_index"),
           py::arg("pool"), py::arg("note"))
      .def_property_readonly("is_open", &PoolLoan::is_open)
      .def("__enter__", &PoolLoan::begin)
      .def("__exit__", [](PoolLoan& loan, const py::args&) { loan.end(); })
      .def("close", &PoolLoan::close);
}
#endif

}  // namespace

void bind_capture(py::module_& m) {
  py::class_<ExecutableHandle>(m, "Executable");
  m.def("make_host_executable", &make_host_executable, py::arg("body"));

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
      .def("__enter__", &AccumulatorSwap::install)
      .def("__exit__",
           [](AccumulatorSwap& swap, const py::object& error, const py::args&) {
             const SwapEnd end(swap);
             if (error.is_none()) swap.join();
           })
      .def("take_left_grads", &AccumulatorSwap::take_left_grads)
      .def_property_readonly("has_parts", &AccumulatorSwap::has_parts)
      .def_property_readonly("reached", &AccumulatorSwap::reached)
      .def("take_kept_grads", &AccumulatorSwap::take_kept_grads);
  py::class_<ReadTrace, std::shared_ptr<ReadTrace>>(m, "ReadTrace")
      .def(py::init<at::Device>(), py::arg("device"))
      .def(
          "watching",
          [](ReadTrace& trace, const at::Tensor& given,
             std::vector<at::Tensor> params) -> ReadTrace& {
            trace.begin(given, std::move(params));
            return trace;
          },
          py::arg("given"), py::arg("params"), py::return_value_policy::reference)
      .def("__enter__", [](const py::object& trace) { return trace; })
      .def("__exit__", [](ReadTrace& trace, const py::args&) { trace.end(); })
      .def(
          "trainable",
          [](ReadTrace& trace, const std::vector<at::Tensor>& known) {
            return or_none({trace.trainable(known)}).front();
          },
          py::arg("known"))
      .def("written", [](const ReadTrace& trace) { return or_none({trace.written()}).front(); })
      .def_static(
          "unseen",
          [](const py::function& call, const py::args& args) {
            const at::DisableRecordFunctionGuard guard;
            return call(*args);
          },
          py::arg("call"))
      .def("keep", &ReadTrace::keep, py::arg("known"))
      .def("has_moved", &ReadTrace::has_moved)
      .def("__len__", &ReadTrace::size);
  py::class_<OpTrace>(m, "OpTrace")
      .def(py::init<>())
      .def_property_readonly("last_op", &OpTrace::last_op);
  bind_capturing_thread(m);
  bind_edges(m);
  m.def("tensors_in", &tensors_in, py::arg("arguments"));
  m.def("computed_argument", &computed_argument, py::arg("arguments"), py::arg("others"),
        py::arg("buffers"));
#ifdef MEGAGRAPH_WITH_CUDA
  m.attr("WITH_CUDA") = true;
  bind_cuda(m);
#else
  m.attr("WITH_CUDA") = false;
#endif
}

}  // namespace megagraph
