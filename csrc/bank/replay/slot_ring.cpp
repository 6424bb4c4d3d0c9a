// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/slot_ring.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace megagraph {

namespace {

template <typename Clock>
int64_t nanoseconds() {
  const auto since_its_start = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_its_start).count();
}

// Since 1970, and never backwards.
int64_t now() {
  using std::chrono::steady_clock;
  static const int64_t start =
      nanoseconds<std::chrono::system_clock>() - nanoseconds<steady_clock>();
  return start + nanoseconds<steady_clock>();
}

}  // namespace

Slot::Slot(int index, int num_sites, std::function<void(int)> on_free,
           std::shared_ptr<void> keep_alive)
    : index_(index),
      on_free_(std::move(on_free)),
      keep_alive_(std::move(keep_alive)),
      outputs_(num_sites, 0),
      gradients_(num_sites, 0),
      nodes_(num_sites, 0),
      holds_(num_sites) {}

bool Slot::lease(int variant, bool training) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (holders_ != 0) return false;
  variant_ = variant;
  training_ = training;
  notice_ = Notice::kUnknown;
  is_patient_ = is_patient_ || !has_met_transients_;
  has_met_transients_ = false;
  holders_ = 1;
  return true;
}

void Slot::release_holders(std::unique_lock<std::mutex>& /*lock*/, int64_t count) {
  TORCH_INTERNAL_ASSERT(holders_ >= count);
  if (holders_ == count) {
    live_.clear();  // a forward without gradients that failed has left no tensor to count
    if (on_free_) on_free_(variant_);
  }
  holders_ -= count;
}

void Slot::end_micro_batch() {
  std::unique_lock<std::mutex> lock(mutex_);
  release_holders(lock);
}

bool Slot::enter(int first, int last) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!live_.empty() && first <= live_.back()) return false;
  if (num_gradients_ > 0 || num_transients_ > 0 || first <= top_output_) return false;
  if (unfinished_ >= 0) return false;
  if (!training_) {
    live_.push_back(last);
    return true;
  }
  for (int site = first; site <= last; ++site) {
    live_.push_back(site);
    ++nodes_[site];
    ++holds_[site];
    ++holders_;
  }
  return true;
}

bool Slot::leave(int first, int last) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto count = static_cast<size_t>(last - first + 1);
  if (unfinished_ >= 0 || live_.size() < count || live_.back() != last ||
      live_[live_.size() - count] != first) {
    return false;
  }
  live_.resize(live_.size() - count);
  return true;
}

void Slot::drop(int first, int last) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto is_dropped = [&](int site) { return first <= site && site <= last; };
    live_.erase(std::remove_if(live_.begin(), live_.end(), is_dropped), live_.end());
  }
  node_done(first, last);
}

void Slot::node_done(int first, int last) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (int site = first; site <= last; ++site) {
    --nodes_[site];
    --holds_[site];
  }
  release_holders(lock, last - first + 1);
}

void Slot::await_finish(int site) {
  const std::lock_guard<std::mutex> lock(mutex_);
  unfinished_ = site;
  is_forgiven_ = false;
}

void Slot::finish(int site) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    unfinished_ = -1;
  }
  node_done(site, site);
}

void Slot::lose(int site) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_forgiven_) lost_ = site;
  }
  finish(site);
}

int Slot::take_unfinished() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int lost = take_lost();
  const bool was_forgiven = std::exchange(is_forgiven_, true);
  return lost >= 0 || was_forgiven ? lost : unfinished_;
}

void Slot::retain_tensor(int site, LeaseKind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++holders_;
  ++holds_[site];
  if (kind == LeaseKind::kGradient) {
    ++gradients_[site];
    ++num_gradients_;
    return;
  }
  if (kind == LeaseKind::kTransient) ++num_transients_;
  ++outputs_[site];
  top_output_ = std::max(top_output_, site);
}

void Slot::release_tensor(int site, LeaseKind kind) {
  std::unique_lock<std::mutex> lock(mutex_);
  --holds_[site];
  is_released_.notify_all();
  if (kind == LeaseKind::kGradient) {
    --gradients_[site];
    --num_gradients_;
    return release_holders(lock);
  }
  if (kind == LeaseKind::kTransient) --num_transients_;
  --outputs_[site];
  while (top_output_ >= 0 && outputs_[top_output_] == 0) --top_output_;
  // Without a backward, a site is live while somebody may read its output.
  if (!training_ && outputs_[site] == 0) {
    live_.erase(std::remove(live_.begin(), live_.end(), site), live_.end());
  }
  release_holders(lock);
}

bool Slot::await_site(int site, std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (nodes_[site] > 0) return false;
  return is_released_.wait_for(lock, patience, [this, site] { return !is_held(site); });
}

bool Slot::await_transients(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  return is_released_.wait_for(lock, patience, [this] { return num_transients_ == 0; });
}

bool Slot::await_stray_transients() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto are_gone = [this] { return num_transients_ == 0; };
  if (are_gone()) return true;
  has_met_transients_ = true;
  is_patient_ = is_patient_ && is_released_.wait_for(lock, kPatience, are_gone);
  return are_gone();
}

bool Slot::is_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return holders_ == 0;
}

bool Slot::is_pending() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(nodes_.begin(), nodes_.end(), [](int32_t count) { return count > 0; });
}

std::string Slot::describe_holders() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  const auto add = [&](int32_t count, const char* what, size_t site) {
    if (count == 0) return;
    if (!text.empty()) text += ", ";
    text += std::to_string(count) + " " + what + (count == 1 ? "" : "s") + " of site " +
            std::to_string(site);
  };
  for (size_t site = 0; site < nodes_.size(); ++site) {
    const bool is_unfinished = static_cast<int>(site) == unfinished_;
    add(nodes_[site], is_unfinished ? "unfinished backward" : "pending backward", site);
    add(outputs_[site] + gradients_[site], "tensor", site);
  }
  return text.empty() ? "a micro-batch that has not ended" : text;
}

bool Slot::wants_notice(const std::function<bool()>& ask) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (notice_ != Notice::kUnknown) return notice_ == Notice::kYes;
  }
  const bool yes = ask();  // may take the GIL: never under the mutex
  const std::lock_guard<std::mutex> lock(mutex_);
  notice_ = yes ? Notice::kYes : Notice::kNo;
  return yes;
}

void Slot::detach() {
  const std::lock_guard<std::mutex> lock(mutex_);
  on_free_ = nullptr;
}

SlotRing::SlotRing(const std::vector<std::shared_ptr<void>>& pools, int num_sites,
                   const std::function<void(int slot, int variant)>& on_free) {
  const int num_slots = static_cast<int>(pools.size());
  TORCH_CHECK_VALUE(num_slots >= 1, "a bank needs at least one slot, got ", num_slots);
  lease_of_slot_.resize(num_slots);
  if (num_slots > 1) leases_.reserve(kLastLeases);
  for (int i = 0; i < num_slots; ++i) {
    auto freed = [this, on_free, i](int variant) {
      --num_leased_;
      end_lease(i);
      if (on_free) on_free(i, variant);
    };
    slots_.push_back(std::make_shared<Slot>(i, num_sites, std::move(freed), pools[i]));
  }
}

SlotRing::~SlotRing() {
  for (const auto& slot : slots_) slot->detach();
}

std::shared_ptr<Slot> SlotRing::acquire(int variant, bool training) {
  for (size_t tried = 0; tried < slots_.size(); ++tried) {
    const auto& slot = slots_[next_];
    next_ = (next_ + 1) % slots_.size();
    if (slot->lease(variant, training)) {
      most_leased_ = std::max(most_leased_, ++num_leased_);
      begin_lease(slot->index(), training);
      return slot;
    }
  }
  return nullptr;
}

void SlotRing::begin_lease(int slot, bool training) {
  if (slots_.size() == 1) return;
  const std::lock_guard<std::mutex> lock(leases_mutex_);
  if (leases_.size() < kLastLeases) leases_.push_back({});
  lease_of_slot_[slot] = num_leases_;
  leases_[num_leases_++ % kLastLeases] = {slot, training, now(), 0};
}

void SlotRing::end_lease(int slot) {
  if (slots_.size() == 1) return;
  const std::lock_guard<std::mutex> lock(leases_mutex_);
  const size_t number = lease_of_slot_[slot];
  if (number + kLastLeases < num_leases_) return;  // others have taken its place since
  leases_[number % kLastLeases].end = now();
}

std::vector<Lease> SlotRing::last_leases() const {
  const std::lock_guard<std::mutex> lock(leases_mutex_);
  std::vector<Lease> last = leases_;
  if (num_leases_ > kLastLeases) {
    std::rotate(last.begin(), last.begin() + num_leases_ % kLastLeases, last.end());
  }
  return last;
}

void SlotRing::continue_from(const SlotRing& former) {
  most_leased_ = former.most_leased_;
  leases_ = former.last_leases();
  num_leases_ = leases_.size();
}

bool SlotRing::are_pending() const {
  return std::all_of(slots_.begin(), slots_.end(),
                     [](const auto& slot) { return slot->is_pending(); });
}

bool SlotRing::are_held() const {
  return std::none_of(slots_.begin(), slots_.end(),
                      [](const auto& slot) { return slot->is_free(); });
}

}  // namespace megagraph
