// SPDX-License-Identifier: Apache-2.0
#include "csrc/torch/storages.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace megagraph {

at::Tensor alias_like(const at::Tensor& like, c10::DataPtr data, std::optional<int64_t> rows) {
  size_t bytes = like.nbytes();
  const bool is_cut = rows.has_value() && like.dim() > 0;
  const int64_t kept = rows.value_or(0);
  if (is_cut) bytes = bytes / std::max<int64_t>(like.size(0), 1) * kept;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
      c10::GetAllocator(like.device().type()), /*resizable=*/true);
  auto impl = like.unsafeGetTensorImpl()->shallow_copy_and_detach(
      /*version_counter=*/c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  if (is_cut) {
    at::DimVector sizes(like.sizes().begin(), like.sizes().end());
    sizes[0] = kept;
    impl->set_sizes_contiguous(sizes);
  }
  return at::Tensor(std::move(impl));
}

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
