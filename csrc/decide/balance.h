// SPDX-License-Identifier: Apache-2.0
// Moves documents away from the costliest rank.
#pragma once

#include "csrc/decide/placement.h"

namespace megagraph {

// Moves documents, or exchanges two, as long as that relieves the costliest rank and leaves no
// other one as costly; looks at `budget` possibilities at most. No pack becomes empty.
void balance(Placement& placement, int64_t budget);

}  // namespace megagraph
