// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/rank_places.h"

#include <torch/csrc/utils/pybind.h>

#include <set>
#include <utility>

#include "csrc/watch/references.h"

namespace py = pybind11;

namespace megagraph {
namespace {

py::object times_each(const py::object& weight, double times) {
  if (weight.is_none()) return weight;
  const py::float_ factor(times);
  if (!py::isinstance<py::list>(weight)) return weight * factor;
  py::list weights;  // of several losses
  for (const py::handle each : weight) {
    weights.append(py::reinterpret_borrow<py::object>(each) * factor);
  }
  return weights;
}

at::Tensor values_of(const py::handle& record) { return record["values"].cast<at::Tensor>(); }

}  // namespace

void ShownRanks::put_back() {
  for (const Before& place : places) place.values[place.name] = place.own;
  if (of_losses.is_none()) return;
  for (const auto& [name, record] : py::dict(metrics())) {
    const py::object over = record.attr("get")("reduce_group");
    // Others are a mean of their own, or over all ranks.
    if (!over.is(of_losses) && !over.is(group)) continue;
    record["reduce_group"] = of_losses;
    if (times == 1) continue;
    const at::Tensor values = values_of(record);
    const auto before = earlier.find(name.cast<std::string>());
    if (before == earlier.end()) {
      values.mul_(times);
    } else {
      values.sub_(before->second).mul_(times).add_(before->second);
    }
  }
}

RankPlaces::RankPlaces(const py::iterable& modules, const std::vector<std::string>& collections,
                       py::object metrics, bool weighs_losses)
    : metrics_(std::move(metrics)) {
  std::set<std::pair<PyObject*, std::string>> met;
  const auto add = [&](const py::object& owner, const char* name, Kind kind) {
    const py::object values = py::getattr(owner, "__dict__", py::none());
    if (values.is_none() || !values.contains(name) || !met.emplace(owner.ptr(), name).second)
      return;
    const auto weak = py::reinterpret_steal<py::object>(PyWeakref_NewRef(owner.ptr(), nullptr));
    const bool is_weak = static_cast<bool>(weak);
    if (!is_weak) PyErr_Clear();
    places_.push_back({is_weak ? weak : owner, is_weak, name, kind});
  };
  for (const py::handle each : modules) {
    const auto module = py::reinterpret_borrow<py::object>(each);
    add(module, "cp_group", Kind::kGroup);
    add(module, "tp_cp_group", Kind::kGroupOfLosses);
    // Beside the group of Transformer Engine's attention.
    add(module, "cp_global_ranks", Kind::kRanks);
    add(module, "cp_stream", Kind::kStream);
    const py::dict values = module.attr("__dict__");
    const auto held = [&](const std::string& name) {
      return values.contains(name) ? py::object(values[name.c_str()]) : py::none();
    };
    for (const std::string& name : collections) add(held(name), "cp", Kind::kGroup);
    const py::object config = held("config");
    add(config, "context_parallel_size", Kind::kSize);
    if (!weighs_losses ||
        !py::getattr(config, "calculate_per_token_loss", py::bool_(false)).cast<bool>())
      continue;
    for (const char* weight : {"moe_aux_loss_coeff", "moe_z_loss_coeff"}) {
      add(config, weight, Kind::kWeight);
    }
  }
}

py::object RankPlaces::shown(const Place& place, const py::object& own, const py::object& group,
                             int64_t size, double times) {
  const bool is_alone = size == 1;
  switch (place.kind) {
    case Kind::kGroup:
    case Kind::kGroupOfLosses:
      return group;
    case Kind::kSize:
      return py::int_(size);
    case Kind::kWeight:
      return times_each(own, times);
    case Kind::kRanks:
      if (is_alone) return py::none();
      return py::module_::import("torch.distributed").attr("get_process_group_ranks")(group);
    case Kind::kStream:
      if (is_alone) return py::none();
      if (!stream_) stream_ = py::module_::import("torch.cuda").attr("Stream")();
      return stream_;
  }
  return own;
}

ShownRanks RankPlaces::show(const py::object& group, int64_t size, double times,
                            bool leaves_metrics) {
  if (size == 1 && !alone_) {
    alone_ = py::module_::import("torch.distributed").attr("ProcessGroup")(0, 1);
  }
  ShownRanks found;
  found.group = size == 1 ? alone_ : group;
  found.metrics = metrics_;
  try {
    for (const Place& place : places_) {
      const py::object owner = place.is_weak ? referent(place.owner.ptr()) : place.owner;
      if (!owner) continue;
      const py::object values = owner.attr("__dict__"), own = values[place.name];
      if (place.kind == Kind::kGroupOfLosses && found.of_losses.is_none()) found.of_losses = own;
      found.places.push_back({values, place.name, own});
      values[place.name] = shown(place, own, found.group, size, times);
    }
    if (found.of_losses.is_none() || !leaves_metrics || times == 1) return found;
    found.times = times;
    for (const auto& [name, record] : py::dict(metrics_())) {
      found.earlier[name.cast<std::string>()] = values_of(record).clone();
    }
  } catch (...) {
    found.of_losses = py::none();
    found.put_back();
    throw;
  }
  return found;
}

}  // namespace megagraph
