// SPDX-License-Identifier: Apache-2.0
#include "csrc/bank/executable.h"

namespace megagraph {
namespace {

class HostExecutable final : public Executable {
 public:
  explicit HostExecutable(std::function<void()> body) : body_(std::move(body)) {}
  void launch() override { body_(); }

 private:
  const std::function<void()> body_;
};

}  // namespace

std::unique_ptr<Executable> make_host_executable(std::function<void()> body) {
  return std::make_unique<HostExecutable>(std::move(body));
}

}  // namespace megagraph
