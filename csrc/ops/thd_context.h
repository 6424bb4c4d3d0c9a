// SPDX-License-Identifier: Apache-2.0
// Where rows lie that context-parallel ranks gather from one another, for host and device alike.
//
// Gathered rows lie one rank after another, each rank's as it holds them
// (csrc/ops/thd_positions.h); in the tail every rank has a contiguous piece. Documents are cut in 2
// * cp_size chunks.
//
// Note [Two documents of one]
// A rank holds chunks r and 2c - 1 - r of each document, one behind the other. To attention these
// are two documents, 2d and 2d + 1, whose queries lie where they are held: chunk r, which sees the
// first r + 1 chunks of the document, and chunk 2c - 1 - r, which sees the first 2c - r. The keys
// of the two are laid out one behind the other, with the chunks that both see twice. So each rank
// has 2c + 1 chunks of keys for a document, as many as every other.
#pragma once

#include "csrc/ops/thd_positions.h"

namespace megagraph {

// Chunks of a document that this rank's first and second chunk of it see.
C10_HOST_DEVICE inline int32_t seen_by_first(int32_t cp_rank) { return cp_rank + 1; }
C10_HOST_DEVICE inline int32_t seen_by_second(int32_t cp_size, int32_t cp_rank) {
  return 2 * cp_size - cp_rank;
}

// Where queries and keys of one of these documents begin; behind the last one, where they end.
struct ContextOffsets {
  int32_t queries, keys;
};
C10_HOST_DEVICE inline ContextOffsets context_offsets(const int32_t* cu, int32_t half,
                                                      int32_t cp_size, int32_t cp_rank) {
  const int32_t doc = half / 2, chunks = 2 * cp_size;
  ContextOffsets at{cu[doc] / cp_size, cu[doc] / chunks * (chunks + 1)};
  if (half % 2 == 1) {
    const int32_t chunk = (cu[doc + 1] - cu[doc]) / chunks;
    at.queries += chunk;
    at.keys += seen_by_first(cp_rank) * chunk;
  }
  return at;
}

// Among the gathered rows, that of a physical row.
C10_HOST_DEVICE inline int32_t gathered_row(const int32_t* cu, int32_t num_seqs, int32_t row,
                                            int32_t total_tokens, int32_t cp_size) {
  const int32_t end = cu[num_seqs], share = total_tokens / cp_size;
  if (row >= end) {
    const int32_t piece = (total_tokens - end) / cp_size;
    return (row - end) / piece * share + end / cp_size + (row - end) % piece;
  }
  const int32_t doc = find_document(cu, num_seqs, row, 1);
  const int32_t chunk = (cu[doc + 1] - cu[doc]) / (2 * cp_size);
  const int32_t at = (row - cu[doc]) / chunk, within = (row - cu[doc]) % chunk;
  const bool is_first = at < cp_size;
  const int32_t rank = is_first ? at : 2 * cp_size - 1 - at;
  return rank * share + cu[doc] / cp_size + (is_first ? 0 : chunk) + within;
}

// The physical row of a gathered one.
C10_HOST_DEVICE inline int32_t physical_row_of_gathered(const int32_t* cu, int32_t num_seqs,
                                                        int32_t row, int32_t total_tokens,
                                                        int32_t cp_size) {
  const int32_t share = total_tokens / cp_size;
  return physical_row(cu, num_seqs, row % share, total_tokens, cp_size, row / share);
}

// The gathered row of one of a rank's keys, Note [Two documents of one]; any row in the keys' tail.
C10_HOST_DEVICE inline int32_t gathered_row_of_key(const int32_t* cu, int32_t num_seqs, int32_t key,
                                                   int32_t total_tokens, int32_t cp_size,
                                                   int32_t cp_rank) {
  const int32_t chunks = 2 * cp_size;
  if (key / (chunks + 1) >= cu[num_seqs] / chunks) return 0;
  int32_t low = 0,
          high = num_seqs;  // invariant: keys of low begin at or before it, those of high after
  while (high - low > 1) {
    const int32_t mid = (low + high) / 2;
    if (int64_t{cu[mid] / chunks} * (chunks + 1) <= key) {
      low = mid;
    } else {
      high = mid;
    }
  }
  const int32_t chunk = (cu[low + 1] - cu[low]) / chunks;
  const int32_t within = key - cu[low] / chunks * (chunks + 1);
  const int32_t of_first = seen_by_first(cp_rank) * chunk;
  const int32_t position = within < of_first ? within : within - of_first;
  return gathered_row(cu, num_seqs, cu[low] + position, total_tokens, cp_size);
}

// Where a gathered row is among a rank's keys: those of its first and of its second chunk. `none`
// where it is not seen.
struct KeyPlaces {
  int32_t first, second;
};
C10_HOST_DEVICE inline KeyPlaces places_of_gathered_row(const int32_t* cu, int32_t num_seqs,
                                                        int32_t row, int32_t total_tokens,
                                                        int32_t cp_size, int32_t cp_rank,
                                                        int32_t none) {
  const int32_t share = total_tokens / cp_size, local = row % share;
  if (local >= cu[num_seqs] / cp_size) return {none, none};
  const int32_t doc = find_document(cu, num_seqs, local, cp_size);
  const int32_t position = document_position(cu, num_seqs, local, cp_size, row / share);
  const int32_t chunk = (cu[doc + 1] - cu[doc]) / (2 * cp_size);
  const int32_t begin = cu[doc] / (2 * cp_size) * (2 * cp_size + 1);
  const int32_t of_first = seen_by_first(cp_rank) * chunk;
  return {position < of_first ? begin + position : none,
          position < seen_by_second(cp_size, cp_rank) * chunk ? begin + of_first + position : none};
}

}  // namespace megagraph
