// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/pack_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "csrc/decide/placement.h"
#include "csrc/decide/require.h"

namespace megagraph {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();
// What a document may cost a rank, of the mean of all ranks.
constexpr double kLimits[] = {1.5, 1.0, 0.75, 0.5, 0.25};
constexpr double kGoodEnough = 1.02;  // of that mean: no other candidate is made
// Places of single ranks that documents are raised by: where there are few, and for more
// candidates.
constexpr int64_t kMostRaised = 256, kRaisedCandidates = 24;
constexpr int64_t kAllRaised = std::numeric_limits<int64_t>::max();
constexpr int kFew = 64;
constexpr int64_t kInTurn = 16;     // numbers of micro-batches that are tried without a gap
constexpr int kFewDocuments = 512;  // of which further candidates are worth their time

void check(const std::vector<int64_t>& lengths, const ScheduleLimits& limits) {
  const int64_t largest = limits.cp_sizes.back();
  const int64_t needed = limits.ranks / largest * limits.multiple;
  require(static_cast<int64_t>(lengths.size()) >= needed, lengths.size(), " documents cannot fill ",
          limits.multiple, " micro-batches of ", limits.ranks, " ranks in groups of at most ",
          largest, ": at least ", needed, " are needed");
  for (size_t i = 0; i < lengths.size(); ++i) {
    require(lengths[i] >= 1 && lengths[i] <= std::numeric_limits<int32_t>::max(), "document ", i,
            ": expected a length in [1, 2**31 - 1], got ", lengths[i]);
  }
}

double mean_load(const Placement& placement) {
  const auto& loads = placement.loads();
  return std::accumulate(loads.begin(), loads.end(), 0.0) / static_cast<double>(loads.size());
}

// Candidates for one number of micro-batches, and the least number that has any.
class Scheduler {
 public:
  Scheduler(const std::vector<int64_t>& lengths, const ScheduleLimits& limits)
      : limits_(limits), costs_(lengths, limits) {
    double sum = 0;
    int64_t rows = 0, places = 0;
    for (int document = 0; document < costs_.num_documents(); ++document) {
      const int level = costs_.level(document, kNoLimit);
      require(level >= 0, "document ", document, " of ", lengths[document],
              " tokens is too long: on each of ", limits.cp_sizes.back(),
              " ranks, the largest group, it takes ",
              costs_.rows(document, costs_.num_levels() - 1), " tokens, and a rank holds ",
              limits.max_tokens);
      const int64_t size = limits.cp_sizes[level];
      sum += costs_.cost(document, level) * static_cast<double>(size);
      rows += costs_.rows(document, level) * size;
      places += size;
    }
    places_ = places;
    mean_ = sum / static_cast<double>(limits.ranks);
    const auto needed = [&](int64_t amount, int64_t of_rank) {
      const int64_t of_all = of_rank * limits.ranks * limits.multiple;
      return (amount + of_all - 1) / of_all;
    };
    first_ = std::max(needed(rows, limits.max_tokens), needed(places, limits.max_seqs));
    last_ = static_cast<int64_t>(lengths.size()) * limits.cp_sizes.back() /
            (limits.ranks * limits.multiple);
  }

  Placement run() const {
    int64_t failed = first_ - 1, number = first_;
    std::optional<Placement> found;
    for (int64_t step = 1; number <= last_ && !(found = any(number));) {
      failed = number;
      if (costs_.num_documents() > kFewDocuments || number - first_ >= kInTurn) step *= 2;
      number = number == last_ ? last_ + 1 : std::min(number + step, last_);
    }
    require(found.has_value(), "found no schedule of ", costs_.num_documents(), " documents onto ",
            limits_.ranks, " ranks with at most ", limits_.max_seqs, " documents and ",
            limits_.max_tokens,
            " tokens a rank and micro-batch, and none empty: raise these limits, "
            "or allow larger cp_sizes");
    // The least number, as far as bisection sees.
    while (number - failed > 1) {
      const int64_t middle = failed + (number - failed) / 2;
      auto fewer = any(middle);
      (fewer ? number : failed) = middle;
      if (fewer) found = std::move(fewer);
    }
    return best(number, *std::move(found));
  }

 private:
  std::optional<Placement> candidate(int64_t number, const Policy& policy,
                                     bool* has_empty_packs = nullptr) const {
    Placement placement(costs_, limits_, number * limits_.multiple);
    const Filling filling = placement.fill(policy);
    if (filling == Filling::kDone) return placement;
    if (has_empty_packs != nullptr) *has_empty_packs |= filling == Filling::kEmptyPack;
    return std::nullopt;
  }

  std::optional<Placement> any(int64_t number) const {
    bool is_short = false;
    auto found = candidate(number, {kNoLimit}, &is_short);
    if (!found) found = candidate(number, {kNoLimit, 0, true}, &is_short);
    if (found || !is_short) return found;
    // Too few documents for packs of single ranks: they have to be on more of these.
    const int64_t places = number * limits_.multiple * limits_.ranks;
    const bool is_few = costs_.num_documents() <= kFew;
    for (int64_t less = 0; !found && less < (is_few ? std::min(places, kMostRaised) : 1); ++less) {
      found = candidate(number, {kNoLimit, places - less});
    }
    // Without a limit to spare packs for, each document opens one where it can.
    return found ? std::move(found) : candidate(number, {0.0, kAllRaised});
  }

  // Of several candidates the one whose costliest rank costs least.
  Placement best(int64_t number, Placement best) const {
    const bool is_small = costs_.num_documents() <= kFewDocuments;
    std::vector<Policy> policies;
    for (const double limit : kLimits) policies.push_back({limit * mean_});
    for (int64_t more = 1; is_small && more <= kRaisedCandidates; ++more) {
      policies.push_back({kNoLimit, places_ + more});
    }
    for (const Policy& policy : policies) {
      if (best.largest_load() <= kGoodEnough * (is_small ? mean_ : mean_load(best))) break;
      auto made = candidate(number, policy);
      if (made && made->largest_load() < best.largest_load()) best = *std::move(made);
    }
    return best;
  }

  const ScheduleLimits& limits_;
  DocumentCosts costs_;
  double mean_;
  int64_t places_;        // packs of single ranks that all documents take, each by itself
  int64_t first_, last_;  // numbers of micro-batches, in multiples
};

// Each rank's packs by falling size, then by falling cost, as Note [Schedules of packs] wants it.
PackSchedule schedule_of(const Placement& placement, const ScheduleLimits& limits) {
  const DocumentCosts& costs = placement.costs();
  PackSchedule schedule;
  schedule.costs = placement.loads();
  std::vector<size_t> num_packs(limits.ranks, 0);
  for (int level = costs.num_levels() - 1; level >= 0; --level) {
    const int64_t size = limits.cp_sizes[level];
    for (int64_t group = 0; group < limits.ranks / size; ++group) {
      std::vector<std::pair<double, int>> order;
      for (const int index : placement.packs_of(level, group)) {
        double cost = 0;
        for (const int document : placement.packs()[index].documents) {
          cost -= costs.cost(document, level);
        }
        order.emplace_back(cost, index);
      }
      std::sort(order.begin(), order.end());
      for (const auto& entry : order) {
        const auto& documents = placement.packs()[entry.second].documents;
        ScheduledPack pack{size, group * size, {documents.begin(), documents.end()}};
        std::sort(pack.documents.begin(), pack.documents.end());
        const size_t number = num_packs[group * size];
        if (number >= schedule.micro_batches.size()) schedule.micro_batches.emplace_back();
        schedule.micro_batches[number].push_back(std::move(pack));
        for (int64_t rank = group * size; rank < (group + 1) * size; ++rank) ++num_packs[rank];
      }
    }
  }
  for (auto& packs : schedule.micro_batches) {
    std::sort(packs.begin(), packs.end(), [](const ScheduledPack& a, const ScheduledPack& b) {
      return a.first_rank < b.first_rank;
    });
  }
  return schedule;
}

}  // namespace

void ScheduleLimits::check() const {
  const std::pair<const char*, int64_t> counts[] = {
      {"ranks", ranks},
      {"max_seqlen_per_dp_cp_rank", max_tokens},
      {"max_packed_seqs", max_seqs},
      {"alignment", alignment},
      {"attention_parity", attention_parity},
      {"micro_batch_multiple", multiple},
  };
  for (const auto& [name, value] : counts) {
    require(value >= 1 && value <= std::numeric_limits<int32_t>::max(), "expected ", name,
            " in [1, 2**31 - 1], got ", value);
  }
  require(!cp_sizes.empty(), "expected at least one of cp_sizes");
  int64_t last = 0;
  for (const int64_t size : cp_sizes) {
    require(size > last && (size & (size - 1)) == 0,
            "expected cp_sizes that are ascending powers of two, got ", size, " after ", last);
    last = size;
  }
  require(ranks % last == 0, "expected ranks that the largest of cp_sizes divides, got ", ranks,
          " ranks and ", last);
  require(exchange >= 0 && std::isfinite(exchange),
          "expected a finite exchange of at least 0, got ", exchange);
}

void ScheduleLimits::require_size(int64_t size) const {
  require(std::find(cp_sizes.begin(), cp_sizes.end(), size) != cp_sizes.end(),
          "expected a cp_size of cp_sizes, got ", size);
}

PackSchedule schedule_packs(const std::vector<int64_t>& lengths, const ScheduleLimits& limits) {
  check(lengths, limits);
  const Scheduler scheduler(lengths, limits);
  return schedule_of(scheduler.run(), limits);
}

std::vector<ScheduledPack> PackSchedule::of_rank(int64_t rank) const {
  require(0 <= rank && rank < static_cast<int64_t>(costs.size()), "expected a rank below ",
          costs.size(), ", got ", rank);
  std::vector<ScheduledPack> found;
  for (const auto& packs : micro_batches) {
    for (const ScheduledPack& pack : packs) {
      const int64_t place = rank - pack.first_rank;
      if (place >= 0 && place < pack.cp_size) found.push_back(pack);
    }
  }
  return found;
}

}  // namespace megagraph
