// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/dispatch.h"

namespace megagraph {

std::optional<EagerReason> PackShape::exceeds(const Capacity& capacity) const {
  if (tokens > capacity.tokens) return EagerReason::kTooManyTokens;
  if (num_seqs > capacity.num_seqs) return EagerReason::kTooManySequences;
  if (max_seqlen > capacity.max_seqlen) return EagerReason::kSequenceTooLong;
  return std::nullopt;
}

Decision decide(const PackShape& shape, const std::vector<Capacity>& capacities) {
  Decision found;
  std::optional<EagerReason> why;
  for (size_t i = 0; i < capacities.size(); ++i) {
    const auto exceeded = shape.exceeds(capacities[i]);
    if (!exceeded) {
      const bool is_cheaper = found.capacity < 0 || capacities[i] < capacities[found.capacity];
      if (is_cheaper) found.capacity = static_cast<int>(i);
    } else if (!why || *exceeded == EagerReason::kSequenceTooLong ||
               *why == EagerReason::kTooManyTokens) {
      why = exceeded;
    }
  }
  if (why) found.reason = *why;
  return found;
}

}  // namespace megagraph
