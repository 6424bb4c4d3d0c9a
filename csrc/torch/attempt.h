// SPDX-License-Identifier: Apache-2.0
// Calls that may fail where the ones after them must be made all the same.
#pragma once

namespace megagraph {

// Calls, and answers whether nothing was thrown.
template <typename Step>
bool attempt(Step step) noexcept {
  try {
    step();
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace megagraph
