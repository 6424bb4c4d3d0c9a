// SPDX-License-Identifier: Apache-2.0
// The bank, its sites and its slots.

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bank/capture/read_trace.h"
#include "csrc/bank/replay/finish.h"
#include "csrc/bank/replay/graph_bank.h"
#include "csrc/bank/replay/site.h"
#include "csrc/bank/replay/slot_ring.h"
#include "csrc/python/bindings.h"
#include "csrc/python/dispatcher.h"
#include "csrc/python/eager_reasons.h"
#include "csrc/python/site_object.h"
#include "csrc/torch/storages.h"
#ifdef MEGAGRAPH_WITH_CUDA
#include "csrc/torch/graph_pool.h"
#endif

namespace py = pybind11;

namespace megagraph {
namespace {

// The cudaGraphExec_t of each captured site, forward and backward, by index.
std::pair<std::vector<uint64_t>, std::vector<uint64_t>> raw_graph_execs(GraphBank& bank,
                                                                        int variant, int slot) {
  std::vector<uint64_t> forward, backward;
  for (int index = 0; index < bank.num_sites(); ++index) {
    const SiteGraph* graph = bank.site(index).graph(variant, slot);
    if (graph == nullptr) continue;
    forward.push_back(reinterpret_cast<uint64_t>(graph->forward->raw()));
    if (graph->backward) backward.push_back(reinterpret_cast<uint64_t>(graph->backward->raw()));
  }
  return {forward, backward};
}

void set_listener(GraphBank& bank, std::function<bool()> wants, std::function<void(int, int)> done,
                  std::function<void(int)> finished, const std::vector<int>& noticed) {
  std::vector<bool> is_noticed(bank.num_sites());
  for (const int site : noticed) is_noticed.at(site) = true;
  bank.set_listener(std::make_shared<const GradientListener>(GradientListener{
      std::move(wants), std::move(done), std::move(finished), std::move(is_noticed)}));
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

void set_counters(GraphBank& bank, const std::map<std::string, int64_t>& values) {
  Counters& counters = bank.counters();
  counters.calls = values.at("calls");
  counters.replays = values.at("replays");
  for (size_t i = 0; i < kEagerReasonNames.size(); ++i) {
    counters.eager[i] = values.at(kEagerReasonNames[i]);
  }
}

// Of each slot. Only a CUDA build has pools to keep alive.
#ifdef MEGAGRAPH_WITH_CUDA
using Pools = std::vector<std::vector<std::shared_ptr<PoolHold>>>;
#else
using Pools = std::vector<std::vector<std::shared_ptr<Slot>>>;
#endif

std::shared_ptr<GraphBank> make_bank(c10::Device device, int num_sites, int num_slots,
                                     const Pools& pools, GraphBank::Facing facing, bool poison,
                                     RunEagerAlike run_eager_alike) {
  TORCH_CHECK_VALUE(num_slots >= 1, "a bank needs at least one slot, got ", num_slots);
  TORCH_CHECK_VALUE(pools.empty() || static_cast<int>(pools.size()) == num_slots, "expected ",
                    num_slots, " lists of pools, one for each slot, got ", pools.size());
  std::vector<std::shared_ptr<void>> held;
  for (const auto& of_slot : pools) held.push_back(std::make_shared<Pools::value_type>(of_slot));
  held.resize(num_slots);  // the host's slots have none
  return std::make_shared<GraphBank>(device, num_sites, held, std::move(facing), poison,
                                     std::move(run_eager_alike));
}

// A call on a span of sites; without its last one, on one site.
template <typename Result>
auto of_span(Result (Slot::*call)(int, int)) {
  return [call](Slot& slot, int first, std::optional<int> last) {
    return (slot.*call)(first, last.value_or(first));
  };
}

void bind_slot(py::module_& m) {
  py::enum_<LeaseKind>(m, "LeaseKind")
      .value("OUTPUT", LeaseKind::kOutput)
      .value("TRANSIENT", LeaseKind::kTransient)
      .value("GRADIENT", LeaseKind::kGradient);
  py::class_<Slot, std::shared_ptr<Slot>>(m, "Slot")
      .def(py::init([](int index, int num_sites) {
             return std::make_shared<Slot>(index, num_sites, nullptr, nullptr);
           }),
           py::arg("index"), py::arg("num_sites"))
      .def("lease", &Slot::lease, py::arg("variant"), py::arg("training"))
      .def("end_micro_batch", &Slot::end_micro_batch)
      .def("enter", of_span(&Slot::enter), py::arg("first"), py::arg("last") = py::none())
      .def("leave", of_span(&Slot::leave), py::arg("first"), py::arg("last") = py::none())
      .def("drop", of_span(&Slot::drop), py::arg("first"), py::arg("last") = py::none())
      .def("node_done", of_span(&Slot::node_done), py::arg("first"), py::arg("last") = py::none())
      .def("retain_tensor", &Slot::retain_tensor, py::arg("site"),
           py::arg("kind") = LeaseKind::kOutput)
      .def("release_tensor", &Slot::release_tensor, py::arg("site"),
           py::arg("kind") = LeaseKind::kOutput)
      .def_property_readonly("is_free", &Slot::is_free)
      .def(
          "await_transients",
          [](Slot& slot, int64_t milliseconds) {
            const py::gil_scoped_release no_gil;
            return slot.await_transients(std::chrono::milliseconds(milliseconds));
          },
          py::arg("milliseconds"))
      .def("await_finish", &Slot::await_finish, py::arg("site"))
      .def("finish", &Slot::finish, py::arg("site"))
      .def("describe_holders", &Slot::describe_holders);
}

void bind_site_graph(py::module_& m) {
  py::class_<SiteGraph, std::shared_ptr<SiteGraph>>(m, "SiteGraph")
      .def_readonly("accumulated", &SiteGraph::accumulated)
      .def_readwrite("reads", &SiteGraph::reads)
      .def_readwrite("borrowed", &SiteGraph::borrowed)
      .def_readwrite("saves_input", &SiteGraph::saves_input)
      .def_readwrite("saves_outputs", &SiteGraph::saves_outputs)
      .def("set_range", [](SiteGraph& graph, const std::string& name) {
        graph.forward_range = name + " forward";
        graph.backward_range = name + " backward";
        graph.finish_range = name + " rest of the backward";
      });
}

void bind_graph_bank(py::module_& m) {
  py::enum_<BankState>(m, "BankState")
      .value("WARM_UP", BankState::kWarmUp)
      .value("CAPTURING", BankState::kCapturing)
      .value("SEALED", BankState::kSealed)
      .value("RELEASED", BankState::kReleased);
  py::enum_<SegmentKind>(m, "SegmentKind")
      .value("COPY", SegmentKind::kCopy)
      .value("OFFSETS", SegmentKind::kOffsets)
      .value("MASK", SegmentKind::kMask)
      .value("COUNT", SegmentKind::kCount);
  py::class_<MetadataSpec>(m, "MetadataSpec")
      .def(py::init([](SegmentKind kind, at::Tensor example, int source, int fill, bool shared) {
             return MetadataSpec{kind, std::move(example), source, fill, shared};
           }),
           py::kw_only(), py::arg("kind"), py::arg("example"), py::arg("source") = -1,
           py::arg("fill") = -1, py::arg("shared") = false)
      .def_property_readonly("is_staged", &MetadataSpec::is_staged)
      .def("buffer", &MetadataSpec::buffer)
      .def("content", &MetadataSpec::content, py::arg("buffer"), py::arg("sources"),
           py::arg("end_source"));
  py::class_<Finish, std::shared_ptr<Finish>>(m, "Finish")
      .def("__call__", &Finish::launch, py::call_guard<py::gil_scoped_release>());
  py::class_<GraphBank, std::shared_ptr<GraphBank>>(m, "GraphBank")
      .def(py::init(&make_bank), py::arg("device"), py::arg("num_sites"), py::kw_only(),
           py::arg("num_slots"), py::arg("pools"), py::arg("facing"), py::arg("poison"),
           py::arg("run_eager_alike"))
      .def_property_readonly("state", &GraphBank::state)
      .def("become", &GraphBank::become, py::arg("state"))
      .def(
          "count_eager",
          [](GraphBank& bank, EagerReason reason, int64_t calls) {
            bank.counters().count_eager(reason, calls);
          },
          py::arg("reason"), py::arg("calls"))
      .def("counters", &counters_of)
      .def("set_counters", &set_counters, py::arg("counters"))
      .def("continue_from", &GraphBank::continue_from, py::arg("former"))
      .def("release", &GraphBank::release, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_sites", &GraphBank::num_sites)
      .def_property_readonly("num_slots", &GraphBank::num_slots)
      .def_property_readonly("most_in_flight", &GraphBank::most_in_flight)
      .def("last_leases",
           [](const GraphBank& bank) {
             const auto ms = [](int64_t ns) { return static_cast<double>(ns) / 1e6; };
             std::vector<std::tuple<int, bool, double, std::optional<double>>> found;
             for (const Lease& it : bank.last_leases()) {
               const auto end = it.end == 0 ? std::nullopt : std::optional(ms(it.end));
               found.emplace_back(it.slot, it.training, ms(it.begin), end);
             }
             return found;
           })
      .def_property_readonly(
          "slot_index",
          [](const GraphBank& bank) { return bank.current() ? bank.current()->index() : -1; })
      .def(
          "site",
          [](const std::shared_ptr<GraphBank>& bank, int index) {
            return py::reinterpret_steal<py::object>(make_site_object(bank, index));
          },
          py::arg("index"))
      .def("span",
           [](const std::shared_ptr<GraphBank>& bank) {
             return py::reinterpret_steal<py::object>(make_span_object(bank));
           })
      .def(
          "set_site_eager_reason",
          [](GraphBank& bank, int index, EagerReason reason) {
            bank.site(index).set_eager_reason(reason);
          },
          py::arg("index"), py::arg("reason"))
      .def(
          "set_site_calls",
          [](GraphBank& bank, int index, int64_t calls) { bank.site(index).set_calls(calls); },
          py::arg("index"), py::arg("calls"))
      .def(
          "add_variant",
          [](GraphBank& bank, bool training, int end_source, bool fewer_rows,
             std::vector<MetadataSpec> metadata, std::vector<std::vector<at::Tensor>> buffers) {
            return bank.add_variant({training, end_source, fewer_rows, std::move(metadata),
                                     std::move(buffers),
                                     NumericSettings::current(bank.device().type())});
          },
          py::kw_only(), py::arg("training"), py::arg("end_source"), py::arg("fewer_rows"),
          py::arg("metadata"), py::arg("buffers"))
      .def("set_graph", &GraphBank::set_graph, py::arg("site"), py::arg("variant"), py::arg("slot"),
           py::arg("graph"))
      .def("raw_graph_execs", &raw_graph_execs, py::arg("variant"), py::arg("slot"))
      .def("num_document_grids", &GraphBank::num_document_grids, py::arg("variant"),
           py::arg("slot"))
      .def("drop_variant", &GraphBank::drop_variant, py::arg("variant"))
      .def("set_listener", &set_listener, py::arg("wants"), py::arg("done"), py::arg("finished"),
           py::arg("noticed"))
      .def("set_in_step", &GraphBank::set_in_step, py::arg("is_in_step"))
      .def("reason_before_step", &GraphBank::reason_before_step, py::kw_only(), py::arg("training"),
           py::arg("look_at_grads"))
      .def("run_eager_alike", &GraphBank::run_eager_alike, py::arg("variant"), py::arg("site"),
           py::arg("reason"))
      .def("begin", &begin_micro_batch, py::arg("variant"), py::arg("sources"),
           py::arg("look_at_grads"))
      .def("end", &GraphBank::end)
      .def("take_finish", &GraphBank::take_finish)
      .def("take_unfinished", &GraphBank::take_unfinished)
      .def("watch_backward", &GraphBank::watch_backward, py::arg("output"), py::arg("of_sites"))
      .def("shared_gradients", &GraphBank::shared_gradients)
      .def("all_free", &GraphBank::all_free)
      .def("holders", &GraphBank::describe_holders)
      .def("have_borrowed_moved", &GraphBank::have_borrowed_moved)
      .def(
          "changed_setting",
          [](const GraphBank& bank, int variant) {
            return bank.variant(variant).numerics.difference(
                NumericSettings::current(bank.device().type()));
          },
          py::arg("variant"));
}

}  // namespace

void bind_replay(py::module_& m) {
  bind_slot(m);
  bind_site_graph(m);
  bind_graph_bank(m);
  m.def("free_if_unread", &free_if_unread, py::arg("made"), py::arg("taken"));
}

}  // namespace megagraph
