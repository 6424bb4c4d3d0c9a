// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/replay/finish.h"

#include <string>
#include <utility>

#include "csrc/bank/replay/launch.h"
#include "csrc/torch/profiler_range.h"

namespace megagraph {

Finish::Finish(const GraphBank& bank, std::shared_ptr<Slot> slot,
               std::shared_ptr<const VariantGraphs> graphs, int site)
    : status_(bank.status()),
      listener_(bank.listener()),
      device_(bank.device()),
      slot_(std::move(slot)),
      graphs_(std::move(graphs)),
      site_(site) {}

// Runs on any thread, with or without the GIL.
Finish::~Finish() {
  if (stage_.load() == Stage::kUnfinished) slot_->lose(site_);
}

void Finish::await(std::vector<WriteWatch> saved) {
  saved_ = std::move(saved);
  slot_->await_finish(site_);
  stage_.store(Stage::kUnfinished);
}

void Finish::give_up() noexcept { stage_.store(Stage::kGivenUp); }

void Finish::launch() {
  Stage stage = Stage::kUnfinished;
  if (!stage_.compare_exchange_strong(stage, Stage::kFinished)) {
    const char* const why =
        stage == Stage::kFinished ? "twice in one micro-batch"
        : stage == Stage::kGivenUp
            ? "after a backward that failed, or that can't come any more"
            : "before the backward of its micro-batch, whose handle this is and no other's";
    TORCH_CHECK(false, "site ", site_, ", slot ", slot_->index(), ", was asked to finish ", why);
  }
  struct Done {
    Slot& slot;
    int site;
    ~Done() { slot.finish(site); }
  } done{*slot_, site_};

  const RunningPass running(status_);
  check_unchanged();
  {
    const Launch launch(device_);
    const SiteGraph& graph = *graphs_->sites[site_];
    const Range range(graph.finish_range, device_);
    graph.finish->launch();
  }
  if (listener_ != nullptr && slot_->wants_notice(listener_->wants)) listener_->finished(site_);
}

void Finish::check_unchanged() const {
  TORCH_CHECK(!graphs_->sites[site_]->released,
              "the bank was released before the backward of site ", site_, " was finished");
  for (const WriteWatch& saved : saved_) {
    TORCH_CHECK(!saved.has_seen_write(), "the input or the output of site ", site_,
                ", which the rest of its backward needs, has been modified by an inplace operation "
                "since the forward");
  }
  const std::string changed =
      graphs_->numerics.difference_in_backward(NumericSettings::current(device_.type()));
  TORCH_CHECK(changed.empty(), "a numeric setting (", changed,
              ") changed before the backward of site ", site_,
              " was finished: keep it through a micro-batch");
}

}  // namespace megagraph
