// SPDX-License-Identifier: Apache-2.0
// The life of one bank: all graphs of one model.
//
// Note [Life of a bank]
// warm-up -> capturing -> sealed <-> suspended -> released. A sealed bank may capture further
// variants between steps (sealed -> capturing -> sealed). It is append-only until it is released:
// freeing one graph of a living bank would free a cuBLAS workspace that others use, so everything
// goes at once.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "csrc/bank/bank_status.h"
#include "csrc/bank/replay/chain.h"

namespace megagraph {

class GraphBank {
 public:
  explicit GraphBank(c10::Device device);
  ~GraphBank();
  GraphBank(const GraphBank&) = delete;
  GraphBank& operator=(const GraphBank&) = delete;

  c10::Device device() const { return device_; }
  BankState state() const { return status_->state.load(); }
  // Throws where Note [Life of a bank] does not allow the step.
  void become(BankState next);
  Counters& counters() { return status_->counters; }

  std::shared_ptr<Chain> add_chain(int num_sites);

  // Drops every graph. Backward passes that are still pending raise from now on. The caller has
  // waited for the device.
  void release();

 private:
  const c10::Device device_;
  const std::shared_ptr<BankStatus> status_;
  std::vector<std::shared_ptr<Chain>> chains_;
};

}  // namespace megagraph
