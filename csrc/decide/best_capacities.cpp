// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/best_capacities.h"

#include <algorithm>
#include <limits>

#include "csrc/decide/require.h"

namespace megagraph {
namespace {

// Padded tokens, padded documents.
using Cost = std::pair<int64_t, int64_t>;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr Cost kImpossible{kNever, kNever};

// Of packs whose tokens, rounded up, are one number.
struct Run {
  int64_t tokens = 0, num_seqs = 0;        // the latter of any pack up to here
  int64_t packs = 0, rows = 0, seqs = 0;   // sums of all packs up to here
  std::map<int64_t, int64_t> documents{};  // packs of its own, by their number
};

// The last one has what is to have room beside the packs.
std::vector<Run> runs_of(const std::map<PackShape, int64_t>& packs, Room room, int64_t multiple) {
  const auto rounded = [&](int64_t tokens) {
    return (std::max<int64_t>(tokens, 1) + multiple - 1) / multiple * multiple;
  };
  std::map<int64_t, Run> by_tokens;
  for (const auto& [shape, count] : packs) {
    require(count >= 1, "expected counts of at least 1, got ", count);
    const int64_t seqs = std::max<int64_t>(shape.num_seqs, 1);
    Run& run = by_tokens[rounded(shape.tokens)];
    run.packs += count;
    run.rows += count * shape.tokens;
    run.seqs += count * seqs;
    run.num_seqs = std::max(run.num_seqs, seqs);
    run.documents[seqs] += count;
  }
  const int64_t largest = std::max(rounded(room.tokens), by_tokens.rbegin()->first);
  Run& last = by_tokens[largest];
  last.num_seqs = std::max(last.num_seqs, room.num_seqs);
  std::vector<Run> runs;
  for (auto& [tokens, run] : by_tokens) {
    const Run before = runs.empty() ? Run{} : runs.back();
    run.tokens = tokens;
    run.num_seqs = std::max(run.num_seqs, before.num_seqs);
    run.packs += before.packs;
    run.rows += before.rows;
    run.seqs += before.seqs;
    runs.push_back(std::move(run));
  }
  return runs;
}

// The best ways to cover the first things in a row, each with a number of captures.
class Table {
 public:
  // The last of the steps: it covers what lies behind `from`, with so many captures.
  struct Step {
    Cost cost = kImpossible;  // of all of them
    int from = 0, taken = 0;
  };

  Table(size_t things, int captures) : captures_(captures), steps_((things + 1) * (captures + 1)) {
    for (int used = 0; used <= captures; ++used) at(0, used).cost = {0, 0};
  }

  Step& at(size_t to, int used) { return steps_[to * (captures_ + 1) + used]; }

  // Covers what lies between, with so many of `used` captures, if that is better.
  void try_step(int from, int to, int used, int taken, Cost cost) {
    const Cost before = at(from, used - taken).cost;
    if (before == kImpossible) return;
    const Cost all{before.first + cost.first, before.second + cost.second};
    Step& best = at(to, used);
    if (all < best.cost) best = {all, from, taken};
  }

 private:
  int captures_;
  std::vector<Step> steps_;
};

// Documents that capacities of one run's tokens have: the last one as many as the run.
class Cuts {
 public:
  Cuts(const Run& run, int captures) : table_(run.documents.size() + 1, captures) {
    for (const auto& [number, count] : run.documents) {
      if (number < run.num_seqs) counts_.emplace_back(number, count);
    }
    const auto full = run.documents.find(run.num_seqs);
    counts_.emplace_back(run.num_seqs, full == run.documents.end() ? 0 : full->second);
    const int all = static_cast<int>(counts_.size());
    for (int to = 1; to <= all; ++to) {
      int64_t padded = 0;
      for (int from = to - 1; from >= 0; --from) {
        padded += counts_[from].second * (counts_[to - 1].first - counts_[from].first);
        for (int used = 1; used <= captures; ++used)
          table_.try_step(from, to, used, 1, {0, padded});
      }
    }
  }

  int64_t padded(int captures) { return table_.at(counts_.size(), captures).cost.second; }

  // The largest first.
  std::vector<int64_t> numbers(int captures) {
    std::vector<int64_t> found;
    for (int to = static_cast<int>(counts_.size()); to > 0; to = table_.at(to, captures--).from) {
      found.push_back(counts_[to - 1].first);
    }
    return found;
  }

 private:
  std::vector<std::pair<int64_t, int64_t>> counts_;
  Table table_;
};

}  // namespace

std::vector<Choice> best_capacities(const std::map<PackShape, int64_t>& packs, Room room,
                                    int64_t multiple, int captures) {
  require(!packs.empty(), "capacities are chosen for packs, and there were none");
  require(multiple >= 1 && captures >= 1, "expected a multiple and captures of at least 1, got ",
          multiple, " and ", captures);
  const std::vector<Run> runs = runs_of(packs, room, multiple);
  const Run none;
  Table table(runs.size(), captures);
  std::vector<Cuts> cuts;
  const int all = static_cast<int>(runs.size());
  for (int to = 1; to <= all; ++to) {
    const Run& run = runs[to - 1];
    Cuts& own = cuts.emplace_back(run, captures);
    for (int from = 0; from < to; ++from) {
      const Run& before = from > 0 ? runs[from - 1] : none;
      const int64_t count = run.packs - before.packs;
      const Cost cost{run.tokens * count - (run.rows - before.rows),
                      run.num_seqs * count - (run.seqs - before.seqs)};
      for (int used = 1; used <= captures; ++used) {
        table.try_step(from, to, used, 1, cost);
        if (from < to - 1) continue;
        for (int taken = 2; taken <= used; ++taken) {
          table.try_step(from, to, used, taken, {cost.first, own.padded(taken)});
        }
      }
    }
  }
  std::vector<Choice> choices;
  for (int most = 1; most <= captures; ++most) {
    Choice choice{{}, table.at(all, most).cost.first};
    int left = most;
    for (int to = all; to > 0;) {
      const Table::Step step = table.at(to, left);
      const int64_t tokens = runs[to - 1].tokens;
      const auto numbers = step.taken > 1 ? cuts[to - 1].numbers(step.taken)
                                          : std::vector<int64_t>{runs[to - 1].num_seqs};
      for (const int64_t number : numbers) choice.capacities.push_back({tokens, number, tokens});
      to = step.from;
      left -= step.taken;
    }
    std::reverse(choice.capacities.begin(), choice.capacities.end());
    choices.push_back(std::move(choice));
  }
  return choices;
}

}  // namespace megagraph
