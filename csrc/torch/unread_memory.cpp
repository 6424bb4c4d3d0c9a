// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/unread_memory.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace megagraph {

bool free_if_unread(const at::Tensor& made, const at::Tensor& taken) {
  const c10::Storage& storage = made.storage();
  if (!storage.is_alias_of(taken.storage()) || !storage.resizable()) return false;
  if (made.use_count() != 2 || storage.use_count() != 2) return false;
  const c10::impl::VirtualGuardImpl device(made.device().type());
  device.recordDataPtrOnStream(storage.data_ptr(), device.getStream(made.device()));
  c10::StorageImpl& memory = *storage.unsafeGetStorageImpl();
  memory.set_data_ptr_noswap(memory.allocator()->allocate(0));
  memory.set_nbytes(0);
  return true;
}

}  // namespace megagraph
