// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/leased_storage.h"

#include <c10/core/Allocator.h>

#include <utility>

#include "csrc/torch/storages.h"

namespace megagraph {
namespace {

struct Holder {
  Holder(const at::Tensor& boundary, std::shared_ptr<Slot> slot, int site, LeaseKind kind)
      : boundary_(boundary), slot_(std::move(slot)), site_(site), kind_(kind) {
    slot_->retain_tensor(site_, kind_);
  }
  ~Holder() { slot_->release_tensor(site_, kind_); }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  const at::Tensor boundary_;  // the host backend's buffers have no other owner after a release
  const std::shared_ptr<Slot> slot_;
  const int site_;
  const LeaseKind kind_;
};

// May run on any thread, with or without the GIL.
void drop_holder(void* holder) { delete static_cast<Holder*>(holder); }

}  // namespace

at::Tensor lease_tensor(const at::Tensor& boundary, const std::shared_ptr<Slot>& slot, int site,
                        LeaseKind kind, std::optional<int64_t> rows) {
  c10::DataPtr data(boundary.mutable_data_ptr(), new Holder(boundary, slot, site, kind),
                    &drop_holder, boundary.device());
  return alias_like(boundary, std::move(data), rows);
}

}  // namespace megagraph
