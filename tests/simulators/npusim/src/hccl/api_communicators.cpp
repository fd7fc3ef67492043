// The C functions that make and end communicators.
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "call.h"
#include "core/fault.h"
#include "core/stream.h"
#include "refusal.h"
#include "registry.h"

namespace npusim::hccl {
namespace {

// The beginning of HcclCommConfig, by its layout (interface facts).
struct Config {
  uint64_t size;
  uint32_t magic;
  uint32_t version;
  uint64_t reserved;
  uint32_t buffer_size;  // MB
  uint32_t deterministic;
  char name[128];
  char identity[128];
  uint32_t expansion_mode;
  uint32_t traffic_class;
  uint32_t service_level;
  uint32_t world_rank;
  uint64_t job;
  uint8_t graph_zero_copy;
  int32_t execute_timeout;  // seconds; -1: not set
};
constexpr uint32_t kConfigMagic = 0xf0f0f0f0;
constexpr uint32_t kBufferNotSet = 0xffffffff;
// How many entries of HcclCommConfigCapability this library knows: up to the execution time-out.
constexpr uint32_t kCapabilities = 9;
constexpr size_t kNameBytes = 128;

std::atomic<int32_t> deterministic{1};  // reductions here always are

Wishes read(const Config* config) {
  if (config == nullptr) throw Refusal(kPointer, "no configuration given");
  if (config->magic != kConfigMagic) {
    throw Refusal(kParameter, "a configuration that was not initialised");
  }
  if (config->buffer_size == 0) throw Refusal(kParameter, "a buffer size of 0 MB");
  Wishes wishes;
  wishes.name.assign(config->name, strnlen(config->name, kNameBytes));
  const bool told = config->size >= offsetof(Config, execute_timeout) + sizeof(int32_t);
  if (told && config->execute_timeout >= 0) {
    wishes.execute = config->execute_timeout * int64_t{1'000'000'000};
  }
  return wishes;
}

RootInfo info_at(const void* memory) {
  RootInfo info{};
  memcpy(&info, needed(memory, "rootInfo"), sizeof(info));
  return info;
}

void* join_and_forget(const RootInfo& info, int ranks, int rank, int device, const Wishes& wishes,
                      const std::atomic<int32_t>* given_up = nullptr) {
  struct Forgetting {
    const RootInfo& info;
    ~Forgetting() { Segment::forget(info); }
  } const at_the_end{info};
  return join(info, ranks, rank, device, wishes, given_up);
}

// All ranks are threads of this process while they wait for each other.
void join_all(const std::vector<int32_t>& devices, void** communicators) {
  const RootInfo info = Segment::create();
  const int ranks = static_cast<int>(devices.size());
  std::vector<std::string> errors(devices.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        communicators[rank] = join(info, ranks, rank, devices[rank], {});
      } catch (const Refusal& refusal) {
        errors[rank] = refusal.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Segment::forget(info);
  for (const std::string& error : errors) {
    if (!error.empty()) throw Refusal(kParameter, error);
  }
}

}  // namespace
}  // namespace npusim::hccl

using namespace npusim::hccl;

HCCL_API int HcclGetRootInfo(void* root_info) {
  return guarded("HcclGetRootInfo", [&] {
    needed(root_info, "rootInfo");
    const RootInfo info = Segment::create();
    memcpy(root_info, &info, sizeof(info));
  });
}

HCCL_API int HcclCommInitRootInfo(uint32_t ranks, const void* root_info, uint32_t rank,
                                  void** communicator) {
  return guarded("HcclCommInitRootInfo", [&] {
    needed(communicator, "comm");
    *communicator = join_and_forget(info_at(root_info), static_cast<int>(ranks),
                                    static_cast<int>(rank), npusim::current_device(), {});
  });
}

HCCL_API int HcclCommInitRootInfoConfig(uint32_t ranks, const void* root_info, uint32_t rank,
                                        const void* config, void** communicator) {
  return guarded("HcclCommInitRootInfoConfig", [&] {
    needed(communicator, "comm");
    const Wishes wishes = read(static_cast<const Config*>(config));
    *communicator = join_and_forget(info_at(root_info), static_cast<int>(ranks),
                                    static_cast<int>(rank), npusim::current_device(), wishes);
  });
}

HCCL_API int HcclCommInitAll(uint32_t count, int32_t* devices, void** communicators) {
  return guarded("HcclCommInitAll", [&] {
    needed(devices, "devices");
    needed(communicators, "comms");
    join_all({devices, devices + count}, communicators);
  });
}

HCCL_API int HcclCommDestroy(void* communicator) {
  if (communicator == nullptr) return kSuccess;
  return guarded("HcclCommDestroy", [&] { destroy(communicator); });
}

// No functions of HCCL's, which has none like them: for the stand-in for NCCL
// (tests/simulators/cudasim). The first is HcclCommInitRootInfo until the flag is set.
HCCL_API int npusim_join_communicator(uint32_t ranks, const void* root_info, uint32_t rank,
                                      void** communicator, const void* given_up) {
  return guarded("npusim_join_communicator", [&] {
    needed(communicator, "comm");
    *communicator = join_and_forget(info_at(root_info), static_cast<int>(ranks),
                                    static_cast<int>(rank), npusim::current_device(), {},
                                    static_cast<const std::atomic<int32_t>*>(given_up));
  });
}

HCCL_API int npusim_abort_communicator(void* communicator) {
  return guarded("npusim_abort_communicator", [&] { npusim::hccl::abort(communicator); });
}

HCCL_API int HcclGetCommName(void* communicator, char* name) {
  return guarded("HcclGetCommName", [&] {
    const std::string found = find(communicator)->name();
    needed(name, "commName");
    memset(name, 0, kNameBytes);
    memcpy(name, found.data(), std::min(found.size(), kNameBytes - 1));
  });
}

// Only the network's errors are reported here (HCCL: CommCheckErrorCqe), and there is no network.
HCCL_API int HcclGetCommAsyncError(void* communicator, int* error) {
  return guarded("HcclGetCommAsyncError", [&] {
    find(communicator);
    needed(error, "asyncError");
    *error = kSuccess;
  });
}

HCCL_API uint32_t HcclGetCommConfigCapability() { return kCapabilities; }

HCCL_API int HcclGetRankSize(void* communicator, uint32_t* size) {
  return guarded("HcclGetRankSize", [&] {
    needed(size, "rankSize");
    *size = static_cast<uint32_t>(find(communicator)->size());
  });
}

HCCL_API int HcclGetRankId(void* communicator, uint32_t* rank) {
  return guarded("HcclGetRankId", [&] {
    needed(rank, "rank");
    *rank = static_cast<uint32_t>(find(communicator)->rank());
  });
}

HCCL_API int HcclSetConfig(int what, int32_t value) {
  return guarded("HcclSetConfig", [&] {
    if (what != 0) throw Refusal(kNotSupported, npusim::text("configuration %d", what));
    deterministic = value;
  });
}

HCCL_API int HcclGetConfig(int what, int32_t* value) {
  return guarded("HcclGetConfig", [&] {
    if (what != 0) throw Refusal(kNotSupported, npusim::text("configuration %d", what));
    needed(value, "configValue");
    *value = deterministic;
  });
}

HCCL_API const char* HcclGetErrorString(int code) { return error_text(code); }
