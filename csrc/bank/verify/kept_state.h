// SPDX-License-Identifier: Apache-2.0
// What calls of sites write in place beside gradients: kept as it was, looked at, and put back.
// Writes to a tensor that a call has given other memory would reach nobody: it gets its own back.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace megagraph {

// What one run has made or left of a site, by what it is in words.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

class KeptState {
 public:
  // What calls of each site, by index, write; `further` is put back at the end only. Of what is
  // `placed` the content is not looked at.
  KeptState(const std::vector<NamedTensors>& of_sites, const std::vector<at::Tensor>& further,
            const NamedTensors& placed);

  // What is there of a site; in no memory of its own.
  NamedTensors found(size_t site) const;
  // The same: copies of what differs from before, and else what was there then.
  NamedTensors now(size_t site) const;
  // Puts a site back.
  void put(size_t site) const;
  // Puts it where it was when `now()` gave this.
  void put(size_t site, const NamedTensors& contents) const;
  // Returns the first of what had other memory or another form by now, in words; empty for nothing.
  std::string put_all_back() const;

 private:
  struct Kept {
    at::Tensor tensor;
    at::Tensor live;  // an alias: some of what sites hold requires a gradient
    at::Tensor before{};
    std::string name{};  // in words
  };

  std::vector<Kept> kept_, placed_;
  std::vector<std::vector<std::pair<std::string, size_t>>> of_sites_;  // by place in these
};

}  // namespace megagraph
