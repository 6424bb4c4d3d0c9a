// SPDX-License-Identifier: Apache-2.0
// Checks what Python hands to the pure algorithms here.
#pragma once

#include <sstream>
#include <stdexcept>

namespace megagraph {

// Raises `std::invalid_argument`, Python's ValueError, of these parts in a row, unless it holds.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace megagraph
