// SPDX-License-Identifier: Apache-2.0
// What a site launches.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/ops/document_grids.h"

namespace megagraph {

// One captured forward or backward pass over static buffers.
class Executable {
 public:
  virtual ~Executable() = default;
  // Runs on the current stream, without the GIL.
  virtual void launch() = 0;
  // The cudaGraphExec_t; null on the host.
  virtual void* raw() const { return nullptr; }
  // What it launches over documents; none on the host.
  virtual const std::vector<DocumentGrid>& document_grids() const {
    static const std::vector<DocumentGrid> none;
    return none;
  }
};

// Host backend: runs `body` again on the static buffers. It shares every path with the GPU except
// the graph itself; it claims no speed and cannot show pool hazards.
class HostExecutable final : public Executable {
 public:
  explicit HostExecutable(std::function<void()> body) : body_(std::move(body)) {}
  void launch() override { body_(); }

 private:
  const std::function<void()> body_;
};

}  // namespace megagraph
