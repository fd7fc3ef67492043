#include "board.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "core/config.h"
#include "core/errors.h"
#include "core/fault.h"
#include "core/start.h"
#include "refusal.h"

namespace npusim::hccl {
namespace {

constexpr int32_t kEntries = 4096;  // then the oldest is used again

struct Entry {
  std::atomic<uint64_t> token;
  std::atomic<int32_t> file;  // number of the root's open file plus 1; 0: there is none yet
};

struct Board {
  std::mutex lock;
  int process = 0;
  int file = -1;
  int32_t next = 0;
  Entry* entries = nullptr;
};

// This process's own; the caller holds its lock.
Board& board() {
  static Board* const kept = new Board;
  return *kept;
}

void make(Board& at) {
  if (at.process == getpid()) return;
  const size_t bytes = sizeof(Entry) * kEntries;
  at.file = memfd_create("npusim-hccl-board", MFD_CLOEXEC);
  void* memory = MAP_FAILED;
  if (at.file >= 0 && ftruncate(at.file, static_cast<off_t>(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, at.file, 0);
  }
  if (memory == MAP_FAILED) throw Refusal(kMemory, "no shared memory for communicators");
  at.entries = static_cast<Entry*>(memory);
  at.process = getpid();
}

// Before anything is counted: the board stays as long as the process.
const bool started = [] {
  at_start([] {
    std::lock_guard<std::mutex> hold(board().lock);
    try {
      make(board());
    } catch (const Refusal& refusal) {
      throw Failure(kOutOfMemory, refusal.what());
    }
  });
  return true;
}();

int open_as(const RootInfo& info, int file) {
  return ::open(text("/proc/%d/fd/%d", info.process, file).c_str(), O_RDWR | O_CLOEXEC);
}

// The number that the root has published; 0 while there is none, -1 when there never will be.
int published(int file, const RootInfo& info) {
  Entry found{};
  const off_t place = static_cast<off_t>(sizeof(Entry)) * info.entry;
  if (pread(file, &found, sizeof(found), place) != sizeof(found)) return -1;
  return found.token == info.token ? found.file.load() : -1;
}

}  // namespace

RootInfo announce() {
  RootInfo info{};
  if (getrandom(&info.token, sizeof(info.token), 0) != sizeof(info.token)) {
    throw Refusal(kMemory, "no random number for a root information");
  }
  Board& own = board();
  std::lock_guard<std::mutex> hold(own.lock);
  make(own);
  info.process = getpid();
  info.file = own.file;
  info.entry = own.next++ % kEntries;
  Entry& entry = own.entries[info.entry];
  if (entry.file > 0) close(entry.file - 1);
  entry.file = 0;
  entry.token = info.token;
  return info;
}

int publish(const RootInfo& info, int (*make_file)(uint64_t token)) {
  Board& own = board();
  std::lock_guard<std::mutex> hold(own.lock);
  make(own);
  Entry& entry = own.entries[info.entry];
  if (entry.token != info.token) throw Refusal(kParameter, "a root information used up");
  if (entry.file == 0) entry.file = make_file(info.token) + 1;
  return entry.file - 1;
}

int look_up(const RootInfo& info, const Patience& patience) {
  const int file = open_as(info, info.file);
  Pause pause;
  int found = file < 0 ? -1 : 0;
  while (found == 0 && !patience.over() && kill(info.process, 0) == 0) {
    found = published(file, info);
    if (found == 0) pause.sleep();
  }
  if (file >= 0) close(file);
  return found > 0 ? open_as(info, found - 1) : -1;
}

void withdraw(const RootInfo& info) {
  Board& own = board();
  std::lock_guard<std::mutex> hold(own.lock);
  if (info.process != getpid() || own.process != getpid()) return;
  Entry& entry = own.entries[info.entry];
  if (entry.token != info.token) return;
  entry.token = 0;
  if (entry.file > 0) close(entry.file - 1);
  entry.file = 0;
}

}  // namespace npusim::hccl
