// SPDX-License-Identifier: Apache-2.0
// Where the modules of a model look for the ranks that share a pack: their groups, and how many
// ranks there are. megagraph/megatron/parallel/context.py, Note [View of a micro-batch], says why
// others are shown there for as long as a micro-batch runs, and how metrics are counted then.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace megagraph {

// Ranks that are shown.
struct ShownRanks {
  // Puts everything back. What metrics have grown by counts as if the ranks that they are added up
  // over had shared the pack.
  void put_back();

  struct Before {
    pybind11::object values;
    pybind11::str name;
    pybind11::object own;
  };

  std::vector<Before> places;
  pybind11::object group;
  pybind11::object of_losses = pybind11::none();  // over which routers add up their losses else
  pybind11::object metrics;  // gives them by name, each a dictionary of attributes
  double times = 1;          // as many ranks as `of_losses`
  std::map<std::string, at::Tensor> earlier;
};

class RankPlaces {
 public:
  // `collections`: attributes of modules that hold a model's groups. `weighs_losses`: routers'
  // losses per token have to be weighed by how many ranks share a pack.
  RankPlaces(const pybind11::iterable& modules, const std::vector<std::string>& collections,
             pybind11::object metrics, bool weighs_losses);

  // Puts a group of `size` ranks, `times` as many as the model's own, in all places; one of one
  // rank is made. Metrics are not weighed where nothing is to be left of what runs.
  ShownRanks show(const pybind11::object& group, int64_t size, double times, bool leaves_metrics);

 private:
  enum class Kind { kGroup, kGroupOfLosses, kRanks, kStream, kSize, kWeight };
  struct Place {
    pybind11::object owner;  // a weak reference, if anything can refer to it so
    bool is_weak;
    pybind11::str name;
    Kind kind;
  };

  pybind11::object shown(const Place& place, const pybind11::object& own,
                         const pybind11::object& group, int64_t size, double times);

  const pybind11::object metrics_;
  std::vector<Place> places_;
  // Null until they are made: a group for what asks for its size and its place and no more, and a
  // stream for attention of other ranks' keys.
  pybind11::object alone_, stream_;
};

}  // namespace megagraph
