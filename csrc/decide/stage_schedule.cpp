// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/stage_schedule.h"

#include <algorithm>

#include "csrc/decide/require.h"

namespace megagraph {
namespace {

// Interleaved 1F1B has its first backward within the second group, and repeats itself from there.
constexpr int64_t kGroupsThatMatter = 2;

}  // namespace

void StageSchedule::check() const {
  require(stages >= 1 && chunks >= 1, "expected at least one stage and chunk, got ", stages,
          " and ", chunks);
  require(0 <= stage && stage < stages, "expected a stage from 0 to ", stages - 1, ", got ", stage);
  require(chunks == 1 || stages > 1, "expected one chunk without a pipeline, got ", chunks);
  require(!has_expert_overlap || stages == 1 || chunks > 1,
          "expected several chunks a stage for expert overlap in a pipeline, got 1");
  require(group() >= stages, "expected groups of at least ", stages,
          " micro-batches, one a stage, got ", group());
}

bool StageSchedule::is_legal(int64_t count) const {
  if (chunks == 1) return count >= 1;
  const int64_t rest = count % group();
  return count >= group() && (rest == 0 || rest >= stages);
}

int64_t StageSchedule::warm_up() const {
  const int64_t behind = stages - stage - 1, extra = has_expert_overlap ? 1 : 0;
  if (chunks == 1) return behind + extra;
  return 2 * behind + (chunks - 1) * group() + extra;
}

std::vector<Pass> StageSchedule::passes(int64_t count, bool forward_only) const {
  require(is_legal(count), "expected a number of micro-batches that stage ", stage, " of ", stages,
          " with ", chunks, " chunks in groups of ", group(), " takes, got ", count);
  std::vector<Pass> forwards;
  for (int64_t start = 0; start < count; start += group()) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t it = start; it < std::min(start + group(), count); ++it) {
        forwards.push_back({true, chunk, it});
      }
    }
  }
  if (forward_only) return forwards;
  std::vector<Pass> order;
  size_t next = 0;
  const auto add_backward = [&] {
    const Pass& forward = forwards[next++];
    order.push_back({false, chunks - 1 - forward.chunk, forward.micro_batch});
  };
  for (size_t index = 0; index < forwards.size(); ++index) {
    order.push_back(forwards[index]);
    if (static_cast<int64_t>(index) >= warm_up()) add_backward();
  }
  while (next < forwards.size()) add_backward();
  return order;
}

std::vector<int64_t> StageSchedule::in_flight(int64_t count) const {
  std::vector<int64_t> now(chunks), most(chunks);
  for (const Pass& pass : passes(count)) {
    now[pass.chunk] += pass.is_forward ? 1 : -1;
    most[pass.chunk] = std::max(most[pass.chunk], now[pass.chunk]);
  }
  return most;
}

std::vector<int64_t> StageSchedule::most_in_flight() const {
  if (chunks == 1) return {warm_up() + 1};
  std::vector<int64_t> most(chunks);
  for (int64_t count = 1; count <= kGroupsThatMatter * group(); ++count) {
    if (!is_legal(count)) continue;
    const std::vector<int64_t> found = in_flight(count);
    std::transform(most.begin(), most.end(), found.begin(), most.begin(),
                   [](int64_t one, int64_t other) { return std::max(one, other); });
  }
  return most;
}

}  // namespace megagraph
