#include "call.h"

#include <utility>

#include "core/errors.h"
#include "core/fault.h"
#include "links.h"
#include "refusal.h"
#include "registry.h"

namespace npusim::hccl {
namespace {

int refused(const char* name, int code, const char* why) {
  const std::string said = text("%s: %s", name, why);
  remember_error(said);
  if (tracing()) trace(text("%s: code %d", said.c_str(), code));
  return code;
}

}  // namespace

int guarded(const char* name, const std::function<void()>& body) {
  try {
    body();
    return kSuccess;
  } catch (const Refusal& refusal) {
    return refused(name, refusal.code, refusal.what());
  } catch (const Failure& failure) {
    return refused(name, kRuntime, failure.what());
  }
}

Call::Call(void* communicator, void* stream) : communicator_(find(communicator)), stream_(stream) {
  if (stream == nullptr) throw Refusal(kPointer, "no stream given");
}

CollectivePlan Call::plan(const Descriptor& what) const {
  CollectivePlan made{what, {}, {}};
  made.out.resize(static_cast<size_t>(size()));
  made.in.resize(static_cast<size_t>(size()));
  return made;
}

void Call::launch(CollectivePlan plan) const {
  link_all(*communicator_, plan.what);
  const std::string what = describe(plan.what);
  put(what, body_of<Collective>(communicator_, std::move(plan)));
}

void Call::launch(ExchangePlan plan) const {
  const std::string what = plan.name;
  put(what, body_of<Exchange>(communicator_, std::move(plan)));
}

void Call::put(const std::string& what, Body body) const {
  const int code = submit(stream_, what, std::move(body));
  if (code != kOk) throw Refusal(kRuntime, text("the stream refused %s: %d", what.c_str(), code));
}

uint8_t* needed(const void* pointer, const char* name) {
  if (pointer == nullptr) throw Refusal(kPointer, text("%s is null", name));
  return static_cast<uint8_t*>(const_cast<void*>(pointer));
}

uint64_t bytes_of(uint64_t count, int32_t type) {
  const size_t size = size_of(type);
  if (size == 0) throw Refusal(kNotSupported, text("data type %d does not exist", type));
  return count * size;
}

void check_reduction(int32_t type, int32_t reduction) {
  if (reduction < kSum || reduction > kMin || !reducible(type, reduction)) {
    throw Refusal(kNotSupported, text("reduction %d of data type %d", reduction, type));
  }
}

void check_rank(const Call& call, uint32_t rank, const char* name) {
  if (rank < static_cast<uint32_t>(call.size())) return;
  throw Refusal(kParameter, text("%s %u of %d ranks", name, rank, call.size()));
}

void check_apart(const char* name, const Block& one, const Block& two) {
  const bool apart = one.bytes == 0 || two.bytes == 0 || one.address + one.bytes <= two.address ||
                     two.address + two.bytes <= one.address;
  if (apart) return;
  const std::string why = text("%s: what is sent and what is received overlap", name);
  fault(why);
  throw Refusal(kParameter, why);
}

}  // namespace npusim::hccl
