// SPDX-License-Identifier: Apache-2.0
// Which release of torch this is compiled against.
//
// Note [The seam to torch]
// Torch promises its public API only, and this core needs more: the graph class's own state, the
// allocators' pools, accumulators, what a running backward computes. Every such corner has a header
// here, and no file outside this folder includes torch's own or asks for the release
// (tests/test_architecture.py has the list). Each header says which releases differ, and how. So a
// new release is read here and nowhere else. This folder includes nothing of ours from outside it.
#pragma once

#include <torch/version.h>

#define MEGAGRAPH_TORCH_SINCE(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||         \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
