#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "board.h"
#include "core/fault.h"
#include "refusal.h"

namespace npusim::hccl {
namespace {

constexpr char kMagic[16] = "npusim-hccl";

size_t header_bytes() { return (sizeof(Header) + 4095) / 4096 * 4096; }

size_t all_bytes(int ranks) {
  return header_bytes() + sizeof(Lane) * static_cast<size_t>(ranks) * static_cast<size_t>(ranks);
}

uint64_t read_token(int file) {
  uint64_t token = 0;
  return pread(file, &token, sizeof(token), 0) == sizeof(token) ? token : 0;
}

void* map(int file, size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
}

// How many ranks the communicator has, after this rank's word for it.
uint32_t agree(void* memory, uint32_t ranks) {
  uint32_t said = 0;
  auto& agreed = static_cast<Header*>(memory)->ranks;
  return agreed.compare_exchange_strong(said, ranks) ? ranks : said;
}

// A new file of the root's that says which communicator it is for.
int make_file(uint64_t token) {
  const int file = memfd_create("npusim-hccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(header_bytes())) != 0 ||
      pwrite(file, &token, sizeof(token), 0) != sizeof(token)) {
    throw Refusal(kMemory, "no shared memory for a communicator");
  }
  return file;
}

int open_file(const RootInfo& info, const Patience& patience) {
  if (memcmp(info.magic, kMagic, sizeof(kMagic)) != 0) {
    throw Refusal(kParameter, "this is no root information of HcclGetRootInfo");
  }
  if (info.process == getpid()) publish(info, make_file);
  const int file = look_up(info, patience);
  if (file >= 0 && read_token(file) == info.token) return file;
  if (file >= 0) close(file);
  throw Refusal(kTimeout, text("the root of the communicator has not come, or is gone: process %d",
                               info.process));
}

}  // namespace

RootInfo Segment::create() {
  RootInfo info = announce();
  memcpy(info.magic, kMagic, sizeof(kMagic));
  return info;
}

void Segment::forget(const RootInfo& info) { withdraw(info); }

std::unique_ptr<Segment> Segment::open(const RootInfo& info, int ranks,
                                       const Patience& patience) {
  const int file = open_file(info, patience);
  void* memory = map(file, header_bytes());
  const uint32_t said = memory == MAP_FAILED ? 0 : agree(memory, static_cast<uint32_t>(ranks));
  if (memory != MAP_FAILED) munmap(memory, header_bytes());
  memory = MAP_FAILED;
  if (said == static_cast<uint32_t>(ranks)) {
    // More than one rank may do so, all with the same size.
    const bool sized = ftruncate(file, static_cast<off_t>(all_bytes(ranks))) == 0;
    if (sized) memory = map(file, all_bytes(ranks));
  }
  close(file);
  if (memory != MAP_FAILED) return std::unique_ptr<Segment>(new Segment(memory, ranks));
  if (said == 0 || said == static_cast<uint32_t>(ranks)) {
    throw Refusal(kMemory, "no shared memory for a communicator");
  }
  const std::string wrong = text("a communicator has %u ranks for one rank and %d for another",
                                 said, ranks);
  fault(wrong);
  throw Refusal(kParameter, wrong);
}

Segment::~Segment() { munmap(memory_, all_bytes(ranks_)); }

Lane& Segment::lane(int from, int to) const {
  Lane* const lanes = reinterpret_cast<Lane*>(static_cast<uint8_t*>(memory_) + header_bytes());
  return lanes[from * ranks_ + to];
}

}  // namespace npusim::hccl
