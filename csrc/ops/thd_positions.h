// SPDX-License-Identifier: Apache-2.0
// Where a local row lies in its document, for host and device alike.
//
// Offsets are global (before context parallelism divides each document), start at 0 and do not
// decrease; a rank's rows lie at offset / cp_size. thd_partition_indices.cpp tells the zigzag
// layout.
#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>

namespace megagraph {

// The document that holds `local_row`: the last one that starts at or before it and is not empty.
// Needs local_row < cu[num_seqs] / cp_size.
C10_HOST_DEVICE inline int32_t find_document(const int32_t* cu, int32_t num_seqs, int32_t local_row,
                                             int32_t cp_size) {
  int32_t low = 0, high = num_seqs;  // invariant: cu[low]/cp <= row < cu[high]/cp
  while (high - low > 1) {
    const int32_t mid = (low + high) / 2;
    if (cu[mid] / cp_size <= local_row) {
      low = mid;
    } else {
      high = mid;
    }
  }
  return low;
}

// Position of `local_row` inside its document, or -1 in the tail.
C10_HOST_DEVICE inline int32_t document_position(const int32_t* cu, int32_t num_seqs,
                                                 int32_t local_row, int32_t cp_size,
                                                 int32_t cp_rank) {
  if (local_row >= cu[num_seqs] / cp_size) return -1;
  const int32_t doc = find_document(cu, num_seqs, local_row, cp_size);
  const int32_t i = local_row - cu[doc] / cp_size;
  if (cp_size == 1) return i;
  const int32_t length = cu[doc + 1] - cu[doc];
  const int32_t chunk = length / (2 * cp_size);
  return i < chunk ? cp_rank * chunk + i : length - (cp_rank + 1) * chunk + (i - chunk);
}

// Row of the unpartitioned buffer that `local_row` of this rank holds.
C10_HOST_DEVICE inline int32_t physical_row(const int32_t* cu, int32_t num_seqs, int32_t local_row,
                                            int32_t total_tokens, int32_t cp_size,
                                            int32_t cp_rank) {
  const int32_t end = cu[num_seqs];
  if (local_row >= end / cp_size) {
    return end + cp_rank * ((total_tokens - end) / cp_size) + (local_row - end / cp_size);
  }
  const int32_t doc = find_document(cu, num_seqs, local_row, cp_size);
  return cu[doc] + document_position(cu, num_seqs, local_row, cp_size, cp_rank);
}

}  // namespace megagraph
