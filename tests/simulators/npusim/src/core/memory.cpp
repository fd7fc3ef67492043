#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "config.h"
#include "errors.h"
#include "fault.h"
#include "pinned.h"

namespace npusim {
namespace {

constexpr size_t kAlign = 512;  // what aclrtMalloc promises
constexpr size_t kGap = 4096;   // between two allocations: an overrun meets nobody

// One device: a window of addresses that fault, the same bytes readable elsewhere, and which parts
// are allocated. Allocation goes round the window, so that a freed range is reused late.
class Arena {
 public:
  explicit Arena(size_t bytes) : size_(bytes) {
    const int file = memfd_create("npusim-device", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
      throw Failure(kOutOfMemory, "the simulated device cannot have its memory");
    }
    window_ = map(PROT_NONE, file);
    alias_ = map(PROT_READ | PROT_WRITE, file);
    close(file);
  }

  void* take(size_t bytes) {
    const size_t size = (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
    size_t start = find(next_, size_, size);
    if (start == size_) start = find(0, next_, size);
    if (start == size_) throw Failure(kOutOfMemory, text("no room for %zu bytes", bytes));
    live_[start] = size;
    used_ += size;
    next_ = start + size + kGap;
    memset(alias_ + start, kFresh, size);
    return window_ + start;
  }

  bool give_back(const void* pointer) {
    const auto found = live_.find(offset(pointer));
    if (found == live_.end()) return false;
    memset(alias_ + found->first, kFreed, found->second);
    used_ -= found->second;
    live_.erase(found);
    return true;
  }

  bool holds(const void* pointer) const {
    return static_cast<const uint8_t*>(pointer) >= window_ &&
           static_cast<const uint8_t*>(pointer) < window_ + size_;
  }

  // Null unless all of it lies in one live allocation.
  uint8_t* readable(const void* pointer, size_t bytes) const {
    const size_t start = offset(pointer);
    auto after = live_.upper_bound(start);
    if (after == live_.begin()) return nullptr;
    --after;
    if (start + bytes > after->first + after->second) return nullptr;
    return alias_ + start;
  }

  size_t free() const { return size_ - used_; }

 private:
  uint8_t* map(int rights, int file) const {
    void* const at = mmap(nullptr, size_, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) throw Failure(kOutOfMemory, "no address space for a simulated device");
    return static_cast<uint8_t*>(at);
  }

  size_t offset(const void* pointer) const {
    return static_cast<size_t>(static_cast<const uint8_t*>(pointer) - window_);
  }

  // The first gap of `size` bytes that starts in [from, until); the window's size if none does.
  size_t find(size_t from, size_t until, size_t size) const {
    size_t start = from;
    auto next = live_.upper_bound(from);
    if (next != live_.begin()) {
      const auto before = std::prev(next);
      start = std::max(start, before->first + before->second + kGap);
    }
    for (; start < until && start + size <= size_; ++next) {
      if (next == live_.end() || start + size + kGap <= next->first) return start;
      start = next->first + next->second + kGap;
    }
    return size_;
  }

  const size_t size_;
  uint8_t* window_;
  uint8_t* alias_;
  std::map<size_t, size_t> live_;
  size_t used_ = 0;
  size_t next_ = 0;
};

struct Everything {
  std::mutex lock;
  std::vector<Arena*> arenas;
};

Everything& all() {
  static Everything* const kept = new Everything;
  return *kept;
}

Arena& arena(int device) {
  auto& arenas = all().arenas;
  if (arenas.empty()) arenas.resize(static_cast<size_t>(config().devices), nullptr);
  Arena*& at = arenas.at(static_cast<size_t>(device));
  if (at == nullptr) at = new Arena(config().memory);
  return *at;
}

int owner(const void* pointer) {
  const auto& arenas = all().arenas;
  for (size_t device = 0; device < arenas.size(); ++device) {
    if (arenas[device] != nullptr && arenas[device]->holds(pointer)) {
      return static_cast<int>(device);
    }
  }
  return -1;
}

}  // namespace

void* device_malloc(int device, size_t bytes) {
  std::lock_guard<std::mutex> hold(all().lock);
  return arena(device).take(bytes);
}

void device_free(void* pointer) {
  std::lock_guard<std::mutex> hold(all().lock);
  const int device = owner(pointer);
  if (device >= 0 && arena(device).give_back(pointer)) return;
  fault(text("%p is freed on the device and was not allocated there", pointer));
  throw Failure(kInvalidParam, "a pointer that was not allocated on a device");
}

Place place_of(const void* pointer) {
  std::lock_guard<std::mutex> hold(all().lock);
  if (owner(pointer) >= 0) return Place::kDevice;
  return is_pinned(pointer) ? Place::kPinned : Place::kPageable;
}

int device_of(const void* pointer) {
  std::lock_guard<std::mutex> hold(all().lock);
  return owner(pointer);
}

uint8_t* host(const void* pointer, size_t bytes, const char* what) {
  static uint8_t nothing;
  if (bytes == 0) return &nothing;  // an empty tensor has no address
  std::lock_guard<std::mutex> hold(all().lock);
  const int device = owner(pointer);
  uint8_t* const at = device < 0 ? nullptr : arena(device).readable(pointer, bytes);
  if (at != nullptr) return at;
  const std::string wrong = text("%s: %zu bytes at %p are not inside one allocation of a device",
                                 what, bytes, pointer);
  fault(wrong);
  throw Failure(kDeviceException, wrong);
}

uint8_t* reach(const void* pointer, size_t bytes, const char* what) {
  if (place_of(pointer) == Place::kDevice) return host(pointer, bytes, what);
  check_host(pointer, bytes, what);
  return static_cast<uint8_t*>(const_cast<void*>(pointer));
}

size_t total_memory() { return config().memory; }

size_t free_memory(int device) {
  std::lock_guard<std::mutex> hold(all().lock);
  return arena(device).free();
}

}  // namespace npusim
