// Words of page-locked host memory that streams wait for and write. CANN's values are words of
// device memory; CUDA's may be either, and its backend is tried on this device too (tests/simulators/cudasim).

#include "../core/engine.h"
#include "../core/memory.h"
#include "api.h"

using namespace npusim;

namespace {

uint32_t* word(void* pointer) {
  return reinterpret_cast<uint32_t*>(reach(pointer, sizeof(uint32_t), "a word of the host"));
}

void put(void* stream, const std::string& what, Body body) {
  const int code = submit(stream, what, std::move(body));
  if (code != kOk) throw Failure(code, recent_error());
}

}  // namespace

NPUSIM_API int npusim_write_word(void* pointer, uint32_t value, void* stream) {
  return guarded("npusim_write_word", [=] {
    word(pointer);
    put(stream, text("word write %u", value),
        at_once([=] { __atomic_store_n(word(pointer), value, __ATOMIC_RELEASE); }));
  });
}

NPUSIM_API int npusim_wait_word(void* pointer, uint32_t value, void* stream) {
  return guarded("npusim_wait_word", [=] {
    word(pointer);
    put(stream, text("word wait %u", value), [=] {
      const uint32_t found = __atomic_load_n(word(pointer), __ATOMIC_ACQUIRE);
      return found == value ? Turn::kDone : Turn::kBlocked;
    });
  });
}
