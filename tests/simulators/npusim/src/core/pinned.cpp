#include "pinned.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "errors.h"
#include "fault.h"
#include "memory.h"

namespace npusim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kQuarantine = size_t{64} << 20;  // bytes of freed blocks that the system gets late

struct Block {
  size_t bytes;
  bool freed;
};

struct Blocks {
  std::mutex lock;
  std::map<const uint8_t*, Block> at;
  std::deque<const uint8_t*> freed;  // the oldest first
  size_t waiting = 0;                // bytes of those

  // The last block that begins before `end`; null when there is none.
  const std::pair<const uint8_t* const, Block>* before(const uint8_t* end) const {
    const auto after = at.lower_bound(end);
    return after == at.begin() ? nullptr : &*std::prev(after);
  }

  // A task that still names a freed block finds it here, not somebody else's memory.
  void give_back() {
    while (waiting > kQuarantine && freed.size() > 1) {
      const auto oldest = at.find(freed.front());
      freed.pop_front();
      waiting -= oldest->second.bytes;
      free(const_cast<uint8_t*>(oldest->first));
      at.erase(oldest);
    }
  }
};

Blocks& blocks() {
  static Blocks* const kept = new Blocks;
  return *kept;
}

}  // namespace

void* pinned_malloc(size_t bytes) {
  void* at = nullptr;
  const size_t size = std::max<size_t>(bytes, 1);
  if (posix_memalign(&at, kPage, size) != 0) {
    throw Failure(kOutOfMemory, text("no %zu bytes of host memory", bytes));
  }
  memset(at, kFresh, size);
  std::lock_guard<std::mutex> hold(blocks().lock);
  blocks().at[static_cast<uint8_t*>(at)] = {size, false};
  return at;
}

void pinned_free(void* pointer) {
  std::lock_guard<std::mutex> hold(blocks().lock);
  const auto found = blocks().at.find(static_cast<uint8_t*>(pointer));
  if (found == blocks().at.end() || found->second.freed) {
    fault(text("%p is freed as pinned memory and is none", pointer));
    throw Failure(kInvalidParam, "a pointer that is no pinned memory");
  }
  memset(pointer, kFreed, found->second.bytes);
  found->second.freed = true;
  blocks().freed.push_back(found->first);
  blocks().waiting += found->second.bytes;
  blocks().give_back();
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> hold(blocks().lock);
  const auto* const at = static_cast<const uint8_t*>(pointer);
  const auto* const block = blocks().before(at + 1);
  return block != nullptr && !block->second.freed && at < block->first + block->second.bytes;
}

void check_host(const void* pointer, size_t bytes, const char* what) {
  std::lock_guard<std::mutex> hold(blocks().lock);
  const auto* const from = static_cast<const uint8_t*>(pointer);
  const auto* const block = blocks().before(from + bytes);
  if (bytes == 0 || block == nullptr) return;
  const uint8_t* const end = block->first + block->second.bytes;
  if (from >= end) return;  // pageable memory behind it
  if (!block->second.freed && from >= block->first && from + bytes <= end) return;
  const std::string wrong = text("%s: %zu bytes at %p are not inside one live block of pinned "
                                 "memory", what, bytes, pointer);
  fault(wrong);
  throw Failure(kDeviceException, wrong);
}

}  // namespace npusim
