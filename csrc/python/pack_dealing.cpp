// SPDX-License-Identifier: Apache-2.0
#include "csrc/python/pack_dealing.h"

#include <ATen/Functions.h>

namespace megagraph {
namespace {

int64_t width_of(const std::vector<at::ScalarType>& types) {
  int64_t width = 0;
  for (const at::ScalarType type : types) width += static_cast<int64_t>(c10::elementSize(type));
  return width;
}

}  // namespace

at::Tensor share(const at::Tensor& document, int64_t rows, int64_t size, int64_t place) {
  TORCH_CHECK_VALUE(
      document.dim() > 0 && 0 <= place && place < size && rows >= 0 &&
          document.size(0) <= rows * size && (size == 1 || rows % 2 == 0),
      "expected a document [L, ...] of at most rows * size, of an even number of rows if "
      "several share it, and a place below size");
  std::vector<int64_t> missing = document.sizes().vec();
  missing[0] = rows * size - missing[0];
  const at::Tensor padded = at::cat({document, document.new_zeros(missing)});
  if (size == 1) return padded;
  const int64_t half = rows / 2;  // zigzag: the pieces of a rank cost it as much as those of others
  const auto piece = [&](int64_t number) { return padded.narrow(0, number * half, half); };
  return at::cat({piece(place), piece(2 * size - 1 - place)});
}

PackDealing::PackDealing(PackSchedule schedule, ScheduleLimits limits,
                         const std::vector<std::vector<int64_t>>& lengths, int64_t rank)
    : schedule_(std::move(schedule)),
      limits_(std::move(limits)),
      num_ranks_(static_cast<int64_t>(lengths.size())),
      rank_(rank) {
  for (int64_t owner = 0; owner < num_ranks_; ++owner) {
    if (owner == rank_) first_ = static_cast<int64_t>(lengths_.size());
    lengths_.insert(lengths_.end(), lengths[owner].begin(), lengths[owner].end());
    owners_.resize(lengths_.size(), owner);
  }
}

std::vector<std::vector<PackDealing::Share>> PackDealing::shares() const {
  std::vector<std::vector<Share>> found(num_ranks_);
  for (const auto& micro_batch : schedule_.micro_batches) {
    for (const ScheduledPack& pack : micro_batch) {
      for (const int64_t document : pack.documents) {
        if (owners_[document] != rank_) continue;
        for (int64_t place = 0; place < pack.cp_size; ++place) {
          found[pack.first_rank + place].push_back(
              {document - first_, rows(document, pack), pack.cp_size, place});
        }
      }
    }
  }
  return found;
}

at::Tensor PackDealing::outgoing(const std::vector<std::vector<at::Tensor>>& documents,
                                 const std::vector<at::ScalarType>& types,
                                 at::Device device) const {
  std::vector<at::Tensor> wholes;
  for (const std::vector<at::Tensor>& tensors : documents) {
    std::vector<at::Tensor> columns;
    for (const at::Tensor& tensor : tensors) {
      columns.push_back(tensor.to(device).unsqueeze(1).contiguous().view(at::kByte));
    }
    wholes.push_back(at::cat(columns, 1));
  }
  const auto bytes = at::TensorOptions(at::kByte).device(device);
  std::vector<at::Tensor> parts{at::empty({0, width_of(types)}, bytes)};
  for (const auto& of_rank : shares()) {
    for (const auto& [document, rows, size, place] : of_rank) {
      parts.push_back(share(wholes.at(document), rows, size, place));
    }
  }
  return at::cat(parts);
}

std::vector<int64_t> PackDealing::sent_rows() const {
  std::vector<int64_t> sent;
  for (const auto& of_rank : shares()) {
    int64_t& sum = sent.emplace_back(0);
    for (const Share& part : of_rank) sum += part.rows;
  }
  return sent;
}

std::vector<int64_t> PackDealing::taken_rows() const {
  std::vector<int64_t> taken(num_ranks_);
  for (const ScheduledPack& pack : schedule_.of_rank(rank_)) {
    for (const int64_t document : pack.documents) {
      taken[owners_[document]] += rows(document, pack);
    }
  }
  return taken;
}

std::vector<std::vector<at::Tensor>> PackDealing::packs(
    const at::Tensor& taken, const std::vector<at::ScalarType>& types) const {
  // Where the next document of each rank begins, which are in the order of the packs.
  std::vector<int64_t> next;
  int64_t end = 0;
  for (const int64_t count : taken_rows()) {
    next.push_back(end);
    end += count;
  }
  std::vector<std::vector<at::Tensor>> packs;
  for (const ScheduledPack& pack : schedule_.of_rank(rank_)) {
    std::vector<at::Tensor> parts;
    for (const int64_t document : pack.documents) {
      int64_t& begin = next[owners_[document]];
      parts.push_back(taken.narrow(0, begin, rows(document, pack)));
      begin += rows(document, pack);
    }
    const at::Tensor whole = at::cat(parts);
    auto& tensors = packs.emplace_back();
    int64_t column = 0;
    for (const at::ScalarType type : types) {
      const auto width = static_cast<int64_t>(c10::elementSize(type));
      // Copied: a type is not viewed where its bytes are not aligned.
      const at::Tensor copied = whole.narrow(1, column, width).clone(at::MemoryFormat::Contiguous);
      tensors.push_back(copied.view(type).flatten());
      column += width;
    }
  }
  return packs;
}

}  // namespace megagraph
