#include "executor.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "acl/api.h"
#include "config.h"
#include "stream.h"

extern "C" int aclrtSynchronizeStream(void* stream);

namespace npusim {
namespace {

// Executors that were prepared and neither launched nor destroyed.
struct Waiting {
  std::mutex lock;
  std::set<const aclOpExecutor*> executors;
};

Waiting& waiting() {
  static Waiting* const kept = new Waiting;
  return *kept;
}

// How often each operator was launched.
struct Count {
  std::mutex lock;
  std::map<std::string, uint64_t> launched;
  std::string told;
};

Count& count() {
  static Count* const kept = new Count;
  return *kept;
}

std::unique_ptr<aclOpExecutor> take(const char* operation, aclOpExecutor* executor) {
  {
    std::lock_guard<std::mutex> hold(waiting().lock);
    if (waiting().executors.erase(executor) == 0) executor = nullptr;
  }
  std::unique_ptr<aclOpExecutor> taken(executor);
  if (taken && (operation == nullptr || taken->operation == operation)) return taken;
  const char* const name = operation == nullptr ? "aclDestroyAclOpExecutor" : operation;
  const std::string wrong = text("%s is given an executor that is not its own, or used up", name);
  fault(wrong);
  throw Failure(kInvalidParam, wrong);
}

// ATen on this thread while it stands for the device: nothing of what the program has switched on
// for its own tensors (gradients, modes, autocast), and sums in one order.
class Device {
 public:
  Device()
      : below_autograd_(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                        c10::autocast_dispatch_keyset | c10::python_ks) {
    if (at::get_num_threads() != 1) at::set_num_threads(1);
  }

 private:
  c10::impl::ExcludeDispatchKeyGuard below_autograd_;
};

// The task of one operator: computes in its first turn, and writes in as many as there are steps.
class Job {
 public:
  Job(std::string operation, Compute compute)
      : operation_(std::move(operation)), compute_(std::move(compute)) {}

  Turn operator()() {
    try {
      const Device device;
      return turn();
    } catch (const c10::Error& error) {
      const std::string wrong = operation_ + ": " + error.what_without_backtrace();
      fault(wrong);
      throw Failure(kDeviceException, wrong);
    }
  }

 private:
  Turn turn() {
    if (steps_.empty()) {
      Writing writing(operation_);
      compute_(writing);
      steps_ = writing.take();
    }
    const size_t until = config().mode == Mode::kEager ? steps_.size() : done_ + 1;
    for (; done_ < std::min(until, steps_.size()); ++done_) steps_[done_]();
    return done_ < steps_.size() ? Turn::kAgain : Turn::kDone;
  }

  std::string operation_;
  Compute compute_;
  std::vector<Step> steps_;
  size_t done_ = 0;
};

}  // namespace

bool known(const char* operation) {
  std::lock_guard<std::mutex> hold(count().lock);
  return count().launched.emplace(operation, 0).second;
}

int prepared(const char* operation, Compute compute, uint64_t* workspace,
             aclOpExecutor** executor) {
  *workspace = 0;  // results in the making are the simulator's own memory
  *executor = new aclOpExecutor{operation, std::move(compute)};
  std::lock_guard<std::mutex> hold(waiting().lock);
  waiting().executors.insert(*executor);
  return kOk;
}

int launch(const char* operation, aclOpExecutor* executor, void* stream) {
  return guarded(operation, [=] {
    const auto taken = take(operation, executor);
    const int code = submit(stream, operation, Job(operation, std::move(taken->compute)));
    if (code != kOk) throw Failure(code, std::string(operation) + " does not reach its stream");
    std::lock_guard<std::mutex> hold(count().lock);
    ++count().launched[operation];
  });
}

int launch_and_wait(const char* operation, aclOpExecutor* executor, void* stream) {
  const int code = launch(operation, executor, stream);
  return code == kOk ? aclrtSynchronizeStream(stream) : code;
}

}  // namespace npusim

NPUSIM_API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  return npusim::guarded("aclDestroyAclOpExecutor", [=] { npusim::take(nullptr, executor); });
}

// Every operator and how often it was launched, "name count" a line, sorted; good until the next
// call. For the self-test of the operators.
NPUSIM_API const char* npusim_operators() {
  npusim::Count& count = npusim::count();
  std::lock_guard<std::mutex> hold(count.lock);
  count.told.clear();
  for (const auto& [name, times] : count.launched) {
    count.told += name + ' ' + std::to_string(times) + '\n';
  }
  return count.told.c_str();
}
