// SPDX-License-Identifier: Apache-2.0
// Why a call ran eager. Closed: megagraph/decide/reasons.py lists the same names in the same order,
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
};

inline constexpr std::array<const char*, 24> kEagerReasonNames = {
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
};
// Whether it depends on what a rank alone may meet inside of a step: somebody's modes, settings,
// tensors. All others are known before it, or are the same on every rank, as the program is.
constexpr bool may_be_of_one_rank(EagerReason reason) {
  return reason == EagerReason::kSignatureChanged || reason == EagerReason::kRecomputing ||
         reason == EagerReason::kNesting || reason == EagerReason::kNumericsChanged ||
         reason == EagerReason::kParametersChanged;
}
static_assert(kEagerReasonNames.size() == static_cast<size_t>(EagerReason::kVerifyFailed) + 1);

}  // namespace megagraph
