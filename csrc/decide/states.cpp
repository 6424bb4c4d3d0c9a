// SPDX-License-Identifier: Apache-2.0
#include "csrc/decide/states.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace megagraph {
namespace {

constexpr int64_t kNobody = -1;
constexpr size_t kMostRemembered = 64;
constexpr int kMostDropped = 2, kMostDoublings = 16, kMostDoublingsOfAll = 5;
// What differs less comes first.
constexpr std::array kLeastFirst = {EagerReason::kGroupDisagreed, EagerReason::kNumericsChanged,
                                    EagerReason::kStateChanged};

// FNV-1a, of a number's bytes.
uint32_t mixed(uint32_t hash, int64_t number) {
  for (int byte = 0; byte < 8; ++byte) {
    hash = (hash ^ (static_cast<uint64_t>(number) >> (8 * byte) & 0xff)) * 16777619u;
  }
  return hash;
}

template <typename Value>
bool share_one(const std::set<Value>& some, const std::set<Value>& others) {
  return std::any_of(some.begin(), some.end(), [&](Value each) { return others.count(each) != 0; });
}

}  // namespace

// Ranks of other packs call in another order.
States::States(int size, bool run_alike)
    : size_(size),
      compares_calls_(size > 1 && run_alike),
      orders_by_calls_(size == 1 || run_alike) {}

std::vector<int64_t> States::local_state(int rank, uint64_t fingerprint, uint64_t settings) {
  settings_ = settings;
  fingerprint_ = fingerprint;
  rank_ = rank;
  const int64_t calls = calls_;
  std::vector<int64_t> said{calls, -calls};
  said.resize(2 + size_);
  said.at(2 + rank) = number_of_own({fingerprint, settings}) + 1;
  return said;
}

bool States::agree(const std::vector<int64_t>& largest) {
  std::vector<int64_t> ranks(largest.begin() + 2, largest.end());
  for (int64_t& place : ranks) --place;
  const auto known = std::find_if(groups_.begin(), groups_.end(),
                                  [&](const Group& each) { return each.ranks == ranks; });
  if (known == groups_.end()) {
    current_ = add(std::move(ranks));
    is_new_ = true;
  } else {
    current_ = known->number;
    is_new_ = of_calls_alone_.erase(current_) != 0;
    use(std::distance(groups_.begin(), known));
  }
  calls_ = 0;
  last_ = {fingerprint_, current_};
  return largest.at(0) == -largest.at(1);
}

bool States::has_many() const { return groups_.size() > kMostRemembered; }

std::set<int64_t> States::forget_oldest(std::set<int64_t> keep) {
  keep.insert(current_);
  std::set<int64_t> gone, known;
  size_t surplus = groups_.size() > kMostRemembered ? groups_.size() - kMostRemembered : 0;
  std::vector<Group> left;
  for (Group& group : groups_) {
    if (surplus > 0 && keep.count(group.number) == 0) {
      gone.insert(group.number);
      times_dropped_.erase(group.number);
      of_calls_alone_.erase(group.number);
      --surplus;
      continue;
    }
    known.insert(group.ranks.at(rank_));
    left.push_back(std::move(group));
  }
  groups_ = std::move(left);
  for (auto own = own_.begin(); own != own_.end();) {
    own = known.count(own->second) != 0 ? std::next(own) : own_.erase(own);
  }
  return gone;
}

void States::add_name(uint64_t fingerprint) {
  const auto group = std::find_if(groups_.begin(), groups_.end(),
                                  [&](const Group& each) { return each.number == current_; });
  own_[{fingerprint, settings_}] = group->ranks.at(rank_);
  fingerprint_ = fingerprint;
  last_ = {fingerprint, current_};
}

void States::rename(uint64_t fingerprint) {
  add_name(fingerprint);
  const Own name{fingerprint, settings_};
  const int64_t number = own_.at(name);
  for (auto own = own_.begin(); own != own_.end();) {
    own = own->second == number && own->first != name ? own_.erase(own) : std::next(own);
  }
}

int64_t States::of_call(uint64_t fingerprint) {
  if (!last_ || last_->first != fingerprint) last_ = {fingerprint, find(fingerprint, settings_)};
  if (compares_calls_) calls_ = mixed(calls_, last_->second);
  return last_->second;
}

int64_t States::under(uint64_t settings) { return last_ ? find(last_->first, settings) : kNobody; }

int64_t States::find(uint64_t fingerprint, uint64_t settings) {
  const Own state{fingerprint, settings};
  if (own_.count(state) == 0) {
    if (size_ > 1) return kNobody;  // nobody knows what the others call it
    return *of_calls_alone_.insert(add({number_of_own(state)})).first;
  }
  const int64_t own = own_.at(state);
  for (size_t index = groups_.size(); index-- > 0;) {
    if (groups_[index].ranks.at(rank_) != own) continue;
    const int64_t number = groups_[index].number;
    if (orders_by_calls_) use(index);
    return number;
  }
  return kNobody;
}

int64_t States::number_of_own(const Own& own) {
  const auto [known, is_new] = own_.emplace(own, num_own_);
  num_own_ += is_new;
  return known->second;
}

int64_t States::add(std::vector<int64_t> ranks) {
  groups_.push_back({std::move(ranks), num_});
  return num_++;
}

void States::use(size_t index) {
  std::rotate(groups_.begin() + static_cast<std::ptrdiff_t>(index),
              groups_.begin() + static_cast<std::ptrdiff_t>(index) + 1, groups_.end());
}

bool States::ask_for_place(const std::set<int64_t>& captured, size_t most) {
  if (waiting_ != current_) waited_ = 0;
  waiting_ = current_;
  if (captured.count(current_) != 0 || captured.size() < most) return true;
  const auto dropped = times_dropped_.find(current_);
  const int times = dropped == times_dropped_.end() ? 0 : dropped->second;
  const int own = times < kMostDropped ? 0 : std::min(times, kMostDoublings);
  const auto of_all = static_cast<int>(num_dropped_ / (2 * most));
  return ++waited_ >= 1 << std::max(own, std::min(of_all, kMostDoublingsOfAll));
}

std::set<int64_t> States::make_room(std::set<int64_t> captured, size_t most) {
  captured.erase(current_);
  std::set<int64_t> dropped;
  for (const Group& group : groups_) {  // the oldest comes first
    if (captured.size() - dropped.size() < most) break;
    if (captured.count(group.number) == 0) continue;
    dropped.insert(group.number);
    ++times_dropped_[group.number];
    ++num_dropped_;
  }
  return dropped;
}

EagerReason States::eager_reason(int64_t number, const std::vector<int64_t>& captured) const {
  std::set<EagerReason> found;
  for (const int64_t other : captured) found.insert(difference(number, other));
  return *std::find_if(kLeastFirst.begin(), kLeastFirst.end() - 1,
                       [&](EagerReason each) { return found.count(each) != 0; });
}

// This rank's modules, its settings, or other ranks.
EagerReason States::difference(int64_t number, int64_t other) const {
  if (own_numbers(number) == own_numbers(other)) return EagerReason::kGroupDisagreed;
  if (share_one(fingerprints(number), fingerprints(other))) return EagerReason::kNumericsChanged;
  return EagerReason::kStateChanged;
}

std::set<int64_t> States::own_numbers(int64_t number) const {
  std::set<int64_t> found;
  for (const Group& group : groups_) {
    if (group.number == number) found.insert(group.ranks.at(rank_));
  }
  return found;
}

std::set<uint64_t> States::fingerprints(int64_t number) const {
  const std::set<int64_t> numbers = own_numbers(number);
  std::set<uint64_t> found;
  for (const auto& [own, known] : own_) {
    if (numbers.count(known) != 0) found.insert(own.first);
  }
  return found;
}

}  // namespace megagraph
