// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace megagraph {
namespace {

constexpr double kEven = 1.002;  // of the mean: nothing more is worth the search

struct Exchange {
  int from = -1, to = -1;
  int given = -1, returned = -1;  // documents; none is returned by a mere move
  double worst;                   // largest load of the ranks concerned
};

class Search {
 public:
  Search(Placement& placement, int64_t budget) : placement_(placement), budget_(budget) {}

  void run() {
    while (budget_ > 0 && !is_even()) {
      const Exchange best = find();
      if (best.given < 0) return;
      placement_.remove(best.from, best.given);
      placement_.add(best.to, best.given);
      if (best.returned >= 0) {
        placement_.remove(best.to, best.returned);
        placement_.add(best.from, best.returned);
      }
    }
  }

 private:
  bool is_even() const {
    const auto& loads = placement_.loads();
    const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
    return placement_.largest_load() * static_cast<double>(loads.size()) <= sum * kEven;
  }

  // The best of what relieves the costliest rank, packs of the least costly groups first.
  Exchange find() {
    const auto& loads = placement_.loads();
    const auto costliest = std::max_element(loads.begin(), loads.end());
    const int64_t rank = costliest - loads.begin();
    const auto& packs = placement_.packs();
    std::vector<std::pair<double, int>> targets;
    std::vector<int> sources;
    for (int index = 0; index < static_cast<int>(packs.size()); ++index) {
      const OpenPack& pack = packs[index];
      if (pack.level < 0) continue;
      targets.emplace_back(placement_.load(pack.level, pack.group), index);
      const int64_t size = placement_.size_of(pack.level);
      if (rank / size == pack.group) sources.push_back(index);
    }
    std::sort(targets.begin(), targets.end());
    Exchange best;
    // Smaller by more than what sums round: else a move could be undone for ever.
    best.worst = *costliest * (1 - 1e-9);
    int64_t round = std::max<int64_t>(budget_ / 16, 4096);
    for (const auto& [load, to] : targets) {
      for (const int from : sources) {
        if (from != to) compare(from, to, best, round);
      }
      if (round <= 0) break;
    }
    return best;
  }

  void compare(int from, int to, Exchange& best, int64_t& round) {
    const auto& packs = placement_.packs();
    for (const int given : packs[from].documents) {
      --round, --budget_;
      if (packs[from].documents.size() > 1) consider({from, to, given, -1, 0}, best);
      for (const int returned : packs[to].documents) {
        --round, --budget_;
        consider({from, to, given, returned, 0}, best);
      }
    }
  }

  void consider(Exchange exchange, Exchange& best) const {
    const DocumentCosts& costs = placement_.costs();
    const OpenPack& from = placement_.packs()[exchange.from];
    const OpenPack& to = placement_.packs()[exchange.to];
    double relief = costs.cost(exchange.given, from.level);
    double burden = costs.cost(exchange.given, to.level);
    int64_t rows_from = -costs.rows(exchange.given, from.level);
    int64_t rows_to = costs.rows(exchange.given, to.level);
    if (exchange.returned >= 0) {
      relief -= costs.cost(exchange.returned, from.level);
      burden -= costs.cost(exchange.returned, to.level);
      rows_from += costs.rows(exchange.returned, from.level);
      rows_to -= costs.rows(exchange.returned, to.level);
      if (!placement_.has_rows(from, rows_from) || !placement_.has_rows(to, rows_to)) return;
    } else if (!placement_.has_room(to, rows_to)) {
      return;
    }
    exchange.worst = worst_of(from, to, relief, burden, best.worst);
    if (exchange.worst < best.worst) best = exchange;
  }

  // The largest load of the ranks of two packs once one has lost and the other gained so much.
  double worst_of(const OpenPack& from, const OpenPack& to, double relief, double burden,
                  double limit) const {
    const int64_t size_from = placement_.size_of(from.level);
    const int64_t size_to = placement_.size_of(to.level);
    const int64_t first_from = from.group * size_from, first_to = to.group * size_to;
    const bool overlap = first_from < first_to + size_to && first_to < first_from + size_from;
    const double own = placement_.load(from.level, from.group);
    if (!overlap) {
      return std::max(own - relief, placement_.load(to.level, to.group) + burden);
    }
    const auto& loads = placement_.loads();
    double worst = 0;
    const int64_t first = std::min(first_from, first_to);
    const int64_t last = std::max(first_from + size_from, first_to + size_to);
    for (int64_t rank = first; rank < last && worst < limit; ++rank) {
      double load = loads[rank];
      if (rank >= first_from && rank < first_from + size_from) load -= relief;
      if (rank >= first_to && rank < first_to + size_to) load += burden;
      worst = std::max(worst, load);
    }
    return worst;
  }

  Placement& placement_;
  int64_t budget_;
};

}  // namespace

void balance(Placement& placement, int64_t budget) { Search(placement, budget).run(); }

}  // namespace megagraph
