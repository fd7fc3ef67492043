#include "callbacks.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "errors.h"
#include "fault.h"
#include "stream.h"

namespace npusim {
namespace {

struct Report {
  HostFunction function;
  void* data;
  std::shared_ptr<std::atomic<bool>> over;
};

constexpr uint64_t kOwn = ~0ull;  // the driver's own thread

// Reports by the thread that is to run them.
class CallbackBoard {
 public:
  void subscribe(uint64_t thread, void* stream) {
    std::lock_guard<std::mutex> hold(lock_);
    if (threads_.emplace(stream, thread).second) return;
    throw Failure(kSubscribed, "a stream is subscribed a second time");
  }

  void unsubscribe(void* stream) {
    std::lock_guard<std::mutex> hold(lock_);
    threads_.erase(stream);
  }

  uint64_t thread_of(void* stream) {
    std::lock_guard<std::mutex> hold(lock_);
    const auto found = threads_.find(stream);
    if (found == threads_.end()) {
      throw Failure(kNotSubscribed, "a callback on a stream that no thread has subscribed to");
    }
    return found->second;
  }

  void hand_in(uint64_t thread, Report report) {
    std::lock_guard<std::mutex> hold(lock_);
    reports_[thread].push_back(std::move(report));
    changed_.notify_all();
  }

  bool process(uint64_t thread, int32_t milliseconds) {
    std::unique_lock<std::mutex> held(lock_);
    const auto some = [&] { return !reports_[thread].empty(); };
    if (milliseconds < 0) {
      changed_.wait(held, some);
    } else if (!changed_.wait_for(held, std::chrono::milliseconds(milliseconds), some)) {
      return false;
    }
    const Report report = reports_[thread].front();
    reports_[thread].pop_front();
    held.unlock();
    report.function(report.data);
    report.over->store(true);
    nudge();
    return true;
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  std::map<void*, uint64_t> threads_;
  std::map<uint64_t, std::deque<Report>> reports_;
};

CallbackBoard& board() {
  static CallbackBoard* const kept = new CallbackBoard;
  return *kept;
}

void launch(uint64_t thread, HostFunction function, void* data, bool blocks, void* stream) {
  std::shared_ptr<std::atomic<bool>> over;
  const int code = submit(stream, "host function", [=]() mutable {
    if (over == nullptr) {
      over = std::make_shared<std::atomic<bool>>(false);
      board().hand_in(thread, {function, data, over});
      if (!blocks) return Turn::kDone;
    }
    return over->load() ? Turn::kDone : Turn::kBlocked;
  });
  if (code != kOk) throw Failure(code, recent_error());
}

}  // namespace

void subscribe(uint64_t thread, void* stream) { board().subscribe(thread, stream); }

void unsubscribe(uint64_t, void* stream) { board().unsubscribe(stream); }

// A captured one is bound to the thread of the captured stream, whatever stream replays it, as in
// the open CANN runtime (ProcCaptureStmSubscribeInfo).
void launch_callback(HostFunction function, void* data, bool blocks, void* stream) {
  launch(board().thread_of(stream), function, data, blocks, stream);
}

bool process_report(int32_t milliseconds) {
  return board().process(static_cast<uint64_t>(pthread_self()), milliseconds);
}

void launch_host_function(HostFunction function, void* data, void* stream) {
  static const bool started = [] {
    std::thread([] {
      for (;;) board().process(kOwn, -1);
    }).detach();
    return true;
  }();
  (void)started;
  launch(kOwn, function, data, true, stream);
}

}  // namespace npusim
