#include "types.h"

#include "core/fault.h"

namespace npusim::hccl {
namespace {

struct Known {
  const char* name;
  size_t size;
};

constexpr Known kTypes[] = {
    {"int8", 1},   {"int16", 2},  {"int32", 4},  {"fp16", 2},  {"fp32", 4}, {"int64", 8},
    {"uint64", 8}, {"uint8", 1},  {"uint16", 2}, {"uint32", 4}, {"fp64", 8}, {"bf16", 2},
    {"int128", 16}, {nullptr, 0}, {"hif8", 1},   {"fp8e4m3", 1}, {"fp8e5m2", 1}, {"fp8e8m0", 1},
};

constexpr const char* kNames[kKinds] = {
    "HcclAllReduce",  "HcclReduce",    "HcclReduceScatter", "HcclReduceScatterV",
    "HcclAllGather",  "HcclAllGatherV", "HcclBroadcast",    "HcclScatter",
    "HcclAlltoAll",   "HcclAlltoAllV", "HcclAlltoAllVC",    "HcclBarrier",
    "HcclSend",       "HcclRecv",      "HcclBatchSendRecv, its send",
    "HcclBatchSendRecv, its receive",
};

constexpr const char* kReductions[] = {"sum", "prod", "max", "min"};

constexpr const char* kErrors[] = {
    "success",          "wrong parameter",     "empty pointer",  "memory error",
    "internal error",   "not supported",       "not found",      "unavailable",
    "system call failed", "time-out",          "cannot open a file", "cannot connect",
    "cannot connect",   "transfer failed",     "transfer failed", "runtime call failed",
    "driver call failed", "profiling failed",  "device failed",  "network failed",
    "try again",        "the remote end failed", "suspended",    "retry failed",
    "out of memory",
};

const Known* known(int32_t type) {
  constexpr auto kCount = static_cast<int32_t>(sizeof(kTypes) / sizeof(kTypes[0]));
  return type >= 0 && type < kCount && kTypes[type].size > 0 ? &kTypes[type] : nullptr;
}

}  // namespace

bool operator==(const Descriptor& left, const Descriptor& right) {
  return left.kind == right.kind && left.type == right.type && left.count == right.count &&
         left.reduction == right.reduction && left.root == right.root;
}

size_t size_of(int32_t type) {
  const Known* const found = known(type);
  return found == nullptr ? 0 : found->size;
}

bool reducible(int32_t type, int32_t reduction) {
  switch (type) {
    case kInt8:
    case kInt32:
    case kInt64:
    case kFp16:
    case kFp32:
      return true;
    case kInt16:
    case kBf16:
      // The 910B has no product of these: documentation of HcclAllReduce, parameter op.
      return reduction != kProd;
    default:
      return false;
  }
}

const char* name_of(Kind kind) { return kNames[static_cast<size_t>(kind)]; }

std::string describe(const Descriptor& what) {
  std::string said = name_of(what.kind);
  if (what.count > 0) {
    const Known* const type = known(what.type);
    said += text(" of %llu %s", static_cast<unsigned long long>(what.count),
                 type == nullptr ? "unknown" : type->name);
  }
  if (what.reduction != kNone) said += text(", %s", kReductions[what.reduction]);
  if (what.root < 0) return said;
  if (what.kind == Kind::kSend || what.kind == Kind::kBatchSend) {
    return said + text(" to rank %d", what.root);
  }
  if (what.kind == Kind::kReceive || what.kind == Kind::kBatchReceive) {
    return said + text(" from rank %d", what.root);
  }
  return said + text(", root %d", what.root);
}

const char* error_text(int code) {
  constexpr int kCount = sizeof(kErrors) / sizeof(kErrors[0]);
  return code >= 0 && code < kCount ? kErrors[code] : "unknown";
}

}  // namespace npusim::hccl
