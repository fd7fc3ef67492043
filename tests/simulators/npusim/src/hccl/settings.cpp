#include "settings.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace npusim::hccl {
namespace {

const char* value_of(const char* name) {
  const char* const value = getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

[[noreturn]] void refuse(const char* name, const char* wanted) {
  fprintf(stderr, "npusim: %s is %s: %s\n", name, value_of(name), wanted);
  _exit(2);
}

int64_t seconds(const char* name, int64_t otherwise) {
  const char* const value = value_of(name);
  if (value == nullptr) return otherwise;
  char* end = nullptr;
  const double number = strtod(value, &end);
  if (end == value || *end != '\0' || !(number >= 0) || number > 4e9) {
    refuse(name, "not a number of seconds");
  }
  return static_cast<int64_t>(number * 1e9);
}

// Reads "rank:number".
void pair(const char* name, int& rank, int64_t& number) {
  const char* const value = value_of(name);
  if (value == nullptr) return;
  long long second = 0;
  char rest = 0;
  if (sscanf(value, "%d:%lld%c", &rank, &second, &rest) != 2 || rank < 0 || second < 0) {
    refuse(name, "not rank:number");
  }
  number = second;
}

Links links() {
  const char* const value = value_of("NPUSIM_HCCL_LINKS");
  if (value == nullptr || strcmp(value, "host") == 0) return Links::kHost;
  if (strcmp(value, "stream") == 0) return Links::kStream;
  refuse("NPUSIM_HCCL_LINKS", "neither host nor stream");
}

int world_rank() {
  for (const char* name : {"NPUSIM_HCCL_RANK", "RANK"}) {
    if (value_of(name) != nullptr) return atoi(value_of(name));
  }
  return -1;
}

}  // namespace

Settings read_settings() {
  Settings out;
  out.connect = seconds("HCCL_CONNECT_TIMEOUT", out.connect);
  out.execute = seconds("HCCL_EXEC_TIMEOUT", out.execute);
  pair("NPUSIM_HCCL_SLOW", out.slow_rank, out.slow);
  out.slow *= 1'000'000;
  int64_t operation = 0;
  pair("NPUSIM_HCCL_DIES", out.doomed_rank, operation);
  out.doomed_operation = static_cast<uint64_t>(operation);
  out.links = links();
  out.world_rank = world_rank();
  return out;
}

}  // namespace npusim::hccl
