// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/placement.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace megagraph {

DocumentCosts::DocumentCosts(const std::vector<int64_t>& lengths, const ScheduleLimits& limits)
    : num_documents_(static_cast<int>(lengths.size())),
      num_levels_(static_cast<int>(limits.cp_sizes.size())),
      max_tokens_(limits.max_tokens),
      by_length_(lengths.size()) {
  std::iota(by_length_.begin(), by_length_.end(), 0);
  std::stable_sort(by_length_.begin(), by_length_.end(),
                   [&](int a, int b) { return lengths[a] > lengths[b]; });
  table_.reserve(lengths.size() * num_levels_);
  const auto parity = static_cast<double>(limits.attention_parity);
  for (const int64_t length : lengths) {
    const auto valid = static_cast<double>(length);
    for (const int64_t size : limits.cp_sizes) {
      const int64_t rows = limits.rows(length, size);
      const auto ranks = static_cast<double>(size);
      const double fetched = static_cast<double>(rows) * (ranks - 1);
      table_.push_back({rows, static_cast<double>(rows) + valid * valid / (parity * ranks) +
                                  limits.exchange * fetched});
    }
  }
}

int DocumentCosts::level(int document, double limit) const {
  int cheapest = -1;
  for (int level = 0; level < num_levels_; ++level) {
    if (rows(document, level) > max_tokens_) continue;
    if (cost(document, level) <= limit) return level;
    if (cheapest < 0 || cost(document, level) < cost(document, cheapest)) cheapest = level;
  }
  return cheapest;
}

Placement::Placement(const DocumentCosts& costs, const ScheduleLimits& limits,
                     int64_t num_micro_batches)
    : costs_(&costs),
      limits_(&limits),
      num_micro_batches_(num_micro_batches),
      loads_(limits.ranks, 0.0) {
  for (const int64_t size : limits.cp_sizes) {
    nodes_.emplace_back(limits.ranks / size);
    room_.emplace_back(limits.ranks / size, 0);
  }
}

Filling Placement::fill(const Policy& policy) {
  const std::vector<int> levels = this->levels(policy);
  std::vector<std::vector<int>> by_level(costs_->num_levels());
  for (const int document : costs_->by_length()) by_level[levels[document]].push_back(document);
  for (int level = costs_->num_levels() - 1; level >= 0; --level) {
    if (level == 0) open_lowest();
    for (const int document : by_level[level]) {
      if (!place(document, level, policy)) return Filling::kNoRoom;
    }
  }
  return fill_empty_packs() ? Filling::kDone : Filling::kEmptyPack;
}

std::vector<int> Placement::levels(const Policy& policy) const {
  std::vector<int> levels(costs_->num_documents());
  int64_t places = 0;
  for (int document = 0; document < costs_->num_documents(); ++document) {
    levels[document] = costs_->level(document, policy.limit);
    places += size_of(levels[document]);
  }
  for (bool has_raised = true; has_raised && places < policy.places;) {
    has_raised = false;
    for (const int document : costs_->by_length()) {
      const int next = levels[document] + 1;
      if (places >= policy.places) break;
      if (next >= costs_->num_levels()) continue;
      if (costs_->rows(document, next) > limits_->max_tokens) continue;
      places += size_of(next) - size_of(next - 1);
      levels[document] = next;
      has_raised = true;
    }
  }
  return levels;
}

double Placement::largest_load() const { return *std::max_element(loads_.begin(), loads_.end()); }

double Placement::load(int level, int64_t group) const {
  const auto first = loads_.begin() + group * size_of(level);
  return *std::max_element(first, first + size_of(level));
}

bool Placement::fits(int document, const OpenPack& pack) const {
  return pack.level >= 0 && has_room(pack, costs_->rows(document, pack.level));
}

void Placement::add(int index, int document) {
  OpenPack& pack = packs_[index];
  pack.documents.push_back(document);
  pack.rows += costs_->rows(document, pack.level);
  const int64_t size = size_of(pack.level);
  const double cost = costs_->cost(document, pack.level);
  for (int64_t rank = pack.group * size; rank < (pack.group + 1) * size; ++rank) {
    loads_[rank] += cost;
  }
}

void Placement::remove(int index, int document) {
  OpenPack& pack = packs_[index];
  pack.documents.erase(std::find(pack.documents.begin(), pack.documents.end(), document));
  pack.rows -= costs_->rows(document, pack.level);
  const int64_t size = size_of(pack.level);
  const double cost = costs_->cost(document, pack.level);
  for (int64_t rank = pack.group * size; rank < (pack.group + 1) * size; ++rank) {
    loads_[rank] -= cost;
  }
}

int Placement::open(int level, int64_t group) {
  packs_.push_back({level, group});
  const int index = static_cast<int>(packs_.size()) - 1;
  nodes_[level][group].push_back(index);
  room_[level][group] = limits_->max_tokens;
  return index;
}

int64_t Placement::num_free(int level, int64_t group) const {
  int64_t num = num_micro_batches_;
  for (int above = level; above < costs_->num_levels(); ++above) {
    const int64_t ratio = size_of(above) / size_of(level);
    num -= static_cast<int64_t>(nodes_[above][group / ratio].size());
  }
  return num;
}

void Placement::open_lowest() {
  for (int64_t group = 0; group < static_cast<int64_t>(nodes_[0].size()); ++group) {
    while (num_free(0, group) > 0) open(0, group);
  }
}

void Placement::set_room(int level, int64_t group) {
  int64_t room = 0;
  for (const int index : nodes_[level][group]) {
    const OpenPack& pack = packs_[index];
    if (has_room(pack, 0)) room = std::max(room, limits_->max_tokens - pack.rows);
  }
  room_[level][group] = room;
}

bool Placement::place(int document, int level, const Policy& policy) {
  const int64_t rows = costs_->rows(document, level);
  const double cost = costs_->cost(document, level);
  // The group with the least load of those that have room, and of those that may open a pack.
  int64_t with_room = -1, with_free = -1;
  double least_with_room = 0, least_with_free = 0;
  for (int64_t group = 0; group < static_cast<int64_t>(nodes_[level].size()); ++group) {
    const double load = loads_[group * size_of(level)];
    if (room_[level][group] >= rows && (with_room < 0 || load < least_with_room)) {
      with_room = group;
      least_with_room = load;
    }
    const bool may_open = level > 0 && (with_free < 0 || load < least_with_free);
    if (may_open && num_free(level, group) > 0) {
      with_free = group;
      least_with_free = load;
    }
  }
  const bool opens = with_free >= 0 && (with_room < 0 || least_with_room + cost > policy.limit);
  if (opens) {
    add(open(level, with_free), document);
    set_room(level, with_free);
    return true;
  }
  if (with_room < 0) return place_on_larger(document, level, policy);
  add_to(document, level, with_room, policy);
  return true;
}

bool Placement::place_on_larger(int document, int level, const Policy& policy) {
  int found_level = -1;
  int64_t found_group = -1;
  double least = std::numeric_limits<double>::infinity();
  for (int above = level + 1; above < costs_->num_levels(); ++above) {
    const int64_t rows = costs_->rows(document, above);
    for (int64_t group = 0; group < static_cast<int64_t>(nodes_[above].size()); ++group) {
      if (room_[above][group] < rows) continue;
      const double load = this->load(above, group) + costs_->cost(document, above);
      if (load >= least) continue;
      least = load;
      found_level = above;
      found_group = group;
    }
  }
  if (found_level < 0) return false;
  add_to(document, found_level, found_group, policy);
  return true;
}

void Placement::add_to(int document, int level, int64_t group, const Policy& policy) {
  int found = -1;
  for (const int index : nodes_[level][group]) {
    const OpenPack& pack = packs_[index];
    if (!fits(document, pack)) continue;
    const bool is_better = found < 0 || (policy.prefers_fullest ? pack.rows > packs_[found].rows
                                                                : pack.rows < packs_[found].rows);
    if (is_better) found = index;
  }
  add(found, document);
  set_room(level, group);
}

// Takes documents from packs that have several; where none can give one, an empty pack becomes one
// with the pack of its neighbours.
bool Placement::fill_empty_packs() {
  std::vector<int> donors;
  for (int index = 0; index < static_cast<int>(packs_.size()); ++index) {
    if (packs_[index].documents.size() > 1) donors.push_back(index);
  }
  for (int index = 0; index < static_cast<int>(packs_.size()); ++index) {
    const bool is_empty = packs_[index].level >= 0 && packs_[index].documents.empty();
    if (!is_empty || take_for(index, donors)) continue;
    const auto num_packs = static_cast<int>(packs_.size());
    if (!merge(index)) return false;
    for (int made = num_packs; made < static_cast<int>(packs_.size()); ++made) {
      if (packs_[made].documents.size() > 1) donors.push_back(made);
    }
  }
  return true;
}

bool Placement::take_for(int empty, std::vector<int>& donors) {
  const OpenPack& target = packs_[empty];
  int donor = -1, taken = -1;
  double most = -1;
  for (const int index : donors) {
    const OpenPack& pack = packs_[index];
    if (pack.level < 0) continue;
    const double load = this->load(pack.level, pack.group);
    if (load <= most) continue;
    // What is taken should relieve the donor, and not make the target the next one.
    const double own = this->load(target.level, target.group);
    double least = std::numeric_limits<double>::infinity();
    for (const int document : pack.documents) {
      if (!fits(document, target)) continue;
      const double worst = std::max(load - costs_->cost(document, pack.level),
                                    own + costs_->cost(document, target.level));
      if (worst < least) {
        least = worst;
        most = load;
        donor = index;
        taken = document;
      }
    }
  }
  if (donor < 0) return false;
  remove(donor, taken);
  add(empty, taken);
  if (packs_[donor].documents.size() < 2) {
    donors.erase(std::find(donors.begin(), donors.end(), donor));
  }
  return true;
}

bool Placement::merge(int empty) {
  const auto [level, group] = std::pair(packs_[empty].level, packs_[empty].group);
  if (level + 1 >= costs_->num_levels()) return false;
  const int64_t above = group / (size_of(level + 1) / size_of(level));
  return lift(level + 1, above, empty) >= 0;
}

// Makes one pack of a group of one of each of its smaller groups, and returns it; -1 where they
// hold too much. The packs that went into it are gone, the one that is named among them.
int Placement::lift(int level, int64_t group, int empty) {
  const int64_t ratio = size_of(level) / size_of(level - 1);
  const int whole = open(level, group);
  for (int64_t part = group * ratio; part < (group + 1) * ratio; ++part) {
    const auto& packs = nodes_[level - 1][part];
    int least = -1;
    for (const int index : packs) {
      const bool is_less =
          least < 0 || std::pair(packs_[index].documents.size(), packs_[index].rows) <
                           std::pair(packs_[least].documents.size(), packs_[least].rows);
      if (index == empty || (least != empty && is_less)) least = index;
    }
    if (least < 0) least = level < 2 ? -1 : lift(level - 1, part, empty);
    if (least < 0 || !absorb(whole, least)) return -1;
  }
  return whole;
}

bool Placement::absorb(int pack, int other) {
  const auto documents = packs_[other].documents;
  for (const int document : documents) {
    if (!fits(document, packs_[pack])) return false;
    remove(other, document);
    add(pack, document);
  }
  auto& siblings = nodes_[packs_[other].level][packs_[other].group];
  siblings.erase(std::find(siblings.begin(), siblings.end(), other));
  packs_[other].level = -1;
  return true;
}

}  // namespace megagraph
