// SPDX-License-Identifier: Apache-2.0
// Why a call ran eager. Closed: megagraph/reasons.py lists the same names in the same order,
// and a test compares them. A reason is added by review only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace megagraph {

enum class EagerReason : uint8_t {
  kDisabled,
  kWarmingUp,
  kNoPackMetadata,
  kTooManySequences,
  kTooManyTokens,
  kSequenceTooLong,
  kCpSizeNotCaptured,
  kSignatureChanged,
  kNoFreeSlot,
  kScopeUnsupported,
  kRecomputing,
  kCaptureFailed,
  kAddressMoved,
  kGroupDisagreed,
  kNesting,
  kNumericsChanged,
  kParametersChanged,
  kForeignHook,
  kSharedParameter,
  kRngNotGraphSafe,
  kSuspended,
  kReleased,
  kStateChanged,
  kVerifyFailed,
  kExpertOverlap,
};

inline constexpr std::array<const char*, 25> kEagerReasonNames = {
    "DISABLED",
    "WARMING_UP",
    "NO_PACK_METADATA",
    "TOO_MANY_SEQUENCES",
    "TOO_MANY_TOKENS",
    "SEQUENCE_TOO_LONG",
    "CP_SIZE_NOT_CAPTURED",
    "SIGNATURE_CHANGED",
    "NO_FREE_SLOT",
    "SCOPE_UNSUPPORTED",
    "RECOMPUTING",
    "CAPTURE_FAILED",
    "ADDRESS_MOVED",
    "GROUP_DISAGREED",
    "NESTING",
    "NUMERICS_CHANGED",
    "PARAMETERS_CHANGED",
    "FOREIGN_HOOK",
    "SHARED_PARAMETER",
    "RNG_NOT_GRAPH_SAFE",
    "SUSPENDED",
    "RELEASED",
    "STATE_CHANGED",
    "VERIFY_FAILED",
    "EXPERT_OVERLAP",
};
static_assert(kEagerReasonNames.size() == static_cast<size_t>(EagerReason::kExpertOverlap) + 1);

}  // namespace megagraph
