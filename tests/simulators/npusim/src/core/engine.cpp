#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "errors.h"
#include "fault.h"

namespace npusim {
namespace {

constexpr int64_t kFirstPause = 20'000;    // nanoseconds until a blocked head is asked again
constexpr int64_t kLongestPause = 500'000;  // it may wait for another process, which cannot nudge
constexpr int64_t kDrift = 1'000'000;      // between two tasks that run though nobody demands them
constexpr int64_t kNeglect = 10;           // so many idle times, and a task runs while calls go on
constexpr int64_t kRest = 50'000'000;      // the longest sleep of an idle engine

bool waits(const Stream& stream) { return !stream.tasks.empty() && stream.error == 0; }

}  // namespace

Engine& Engine::get() {
  static Engine* const kept = new Engine;  // outlives every thread
  return *kept;
}

Engine::Engine()
    : last_call_(now()),
      random_(config().seed * 0x9E3779B97F4A7C15ull + config().rank * 0xBF58476D1CE4E5B9ull + 1),
      process_(getpid()) {
  standard_.resize(static_cast<size_t>(config().devices), nullptr);
}

Lock Engine::lock() {
  if (getpid() != process_) {
    fault("a process that was forked after the device was initialised uses it");
    throw Failure(kNoContext, "the device does not survive a fork");
  }
  return Lock(mutex_);
}

Stream* Engine::add(int device) {
  auto made = std::make_unique<Stream>();
  Stream* const stream = made.get();
  stream->id = next_id_++;
  stream->device = device;
  streams_[stream] = std::move(made);
  order_.push_back(stream);
  start();
  return stream;
}

void Engine::remove(Stream* stream) {
  if (!stream->tasks.empty() && stream->error == 0) {
    fault(text("stream %d is destroyed with %zu tasks on it, the first is %s", stream->id,
               stream->tasks.size(), stream->tasks.front().what.c_str()));
  }
  stream->gone = true;  // its memory stays: recordings of events point to it
}

Stream* Engine::find(void* handle) {
  if (handle == nullptr) return standard(current_device());
  const auto found = streams_.find(static_cast<Stream*>(handle));
  if (found != streams_.end() && !found->second->gone) return found->second.get();
  fault(text("%p is no stream", handle));
  return nullptr;
}

Stream* Engine::get(void* handle) {
  Stream* const stream = find(handle);
  if (stream == nullptr) throw Failure(kUnknownStream, "no such stream");
  return stream;
}

Stream* Engine::standard(int device) {
  Stream*& at = standard_.at(static_cast<size_t>(device));
  if (at == nullptr) at = add(device);
  return at;
}

std::vector<Stream*> Engine::on(int device) {
  std::vector<Stream*> found;
  for (Stream* stream : order_) {
    if (stream->device == device && !stream->gone) found.push_back(stream);
  }
  return found;
}

uint64_t Engine::put(Stream* stream, Task task) {
  if (tracing()) trace(text("stream %d: issued %s", stream->id, task.what.c_str()));
  const uint64_t place = ++stream->issued;
  if (stream->error != 0) {
    stream->ended = place;  // nothing runs on a stream that has failed
    return place;
  }
  task.issued = now();
  stream->tasks.push_back(std::move(task));
  if (stream->tasks.size() == 1) stream->due = 0;
  work_.notify_all();
  return place;
}

void Engine::demand(Stream* stream, uint64_t place) {
  if (place <= stream->demanded) return;
  stream->demanded = place;
  work_.notify_all();
}

bool Engine::drained(Stream* stream) {
  if (stream->ended == stream->issued) {
    stream->asked = 0;
    return true;
  }
  if (stream->asked == 0) stream->asked = now();
  if (now() - stream->asked > config().patience) demand(stream, stream->issued);
  return false;
}

void Engine::progress() {
  ++progress_;
  work_.notify_all();
  done_.notify_all();
}

bool Engine::wait(Lock& held, const std::function<bool()>& ready, int64_t milliseconds) {
  const int64_t expiry = milliseconds < 0 ? INT64_MAX : now() + milliseconds * 1'000'000;
  while (!ready()) {
    const int64_t left = expiry - now();
    if (left <= 0) return false;
    if (config().mode == Mode::kExplore && !running_ && turn(held)) continue;
    // Exploring, nobody else may be there to make progress while every head is blocked.
    const int64_t nap = config().mode == Mode::kExplore ? kLongestPause : kRest;
    done_.wait_for(held, std::chrono::nanoseconds(std::min(left, nap)));
  }
  return true;
}

void Engine::called() {
  Lock held = lock();
  last_call_ = now();
  if (config().mode == Mode::kExplore) turns(held, choose(4));
}

void Engine::asked() {
  if (config().mode != Mode::kExplore) return;
  Lock held = lock();
  turns(held, 1 + choose(3));
}

void Engine::turns(Lock& held, uint32_t most) {
  for (; most > 0 && !running_ && turn(held); --most) {
  }
}

void Engine::steer(std::vector<uint8_t> choices) {
  Lock held = lock();
  choices_ = std::move(choices);
  chosen_ = 0;
  steered_ = true;
}

void Engine::start() {
  if (started_) return;
  started_ = true;
  std::thread([this] { work(); }).detach();
}

void Engine::work() {
  Lock held = lock();
  for (;;) {
    const bool mine = config().mode != Mode::kExplore || now() - last_call_ > config().idle;
    if (!running_ && mine && turn(held)) continue;
    work_.wait_for(held, std::chrono::nanoseconds(mine ? sleep() : config().idle));
  }
}

bool Engine::turn(Lock& held) {
  Stream* const stream = pick(now());
  if (stream == nullptr) return false;
  run(held, stream);
  return true;
}

Stream* Engine::pick(int64_t at) {
  if (config().mode == Mode::kExplore) return explore(at);
  return next([&](Stream& stream) { return may_run(stream, at); });
}

// The choice is among the streams that can get further, in the order of their age, so that nothing
// but the seed decides. A blocked head is not among them until something has moved; when nothing
// else is left it is asked again, without a choice, for what it waits for may be outside.
Stream* Engine::explore(int64_t at) {
  std::vector<Stream*> able;
  for (Stream* stream : order_) {
    if (waits(*stream) && stream->found != progress_) able.push_back(stream);
  }
  if (!able.empty()) return able[choose(static_cast<uint32_t>(able.size()))];
  return next([&](const Stream& stream) { return at >= stream.again; });
}

// The next stream in turn that may run.
Stream* Engine::next(const std::function<bool(Stream&)>& may) {
  for (size_t k = 1; k <= order_.size(); ++k) {
    const size_t place = (last_ + k) % order_.size();
    if (!waits(*order_[place]) || !may(*order_[place])) continue;
    last_ = place;
    return order_[place];
  }
  return nullptr;
}

bool Engine::may_run(Stream& stream, int64_t at) {
  if (stream.found == progress_ && at < stream.again) return false;  // still blocked
  if (stream.begun || stream.ended < stream.demanded) return at >= stream.due;
  if (config().mode == Mode::kDelay) {
    if (stream.due == 0) stream.due = at + delay();
    return at >= stream.due;
  }
  return config().mode != Mode::kLazy || drifts(stream, at);
}

// Nobody demands it, on a lazy device. It runs when it has been neglected for long, since the host
// may watch memory without a call while its other threads go on calling; and it drifts on while
// nobody calls, so that peers get further.
bool Engine::drifts(const Stream& stream, int64_t at) {
  if (at - stream.tasks.front().issued >= kNeglect * config().idle) return true;
  if (at - last_call_ < config().idle || at - last_drift_ < kDrift) return false;
  last_drift_ = at;
  return true;
}

void Engine::run(Lock& held, Stream* stream) {
  running_ = true;
  Body body = std::move(stream->tasks.front().body);
  const std::string what = stream->tasks.front().what;
  if (tracing()) trace(text("stream %d: turn of %s", stream->id, what.c_str()));
  stream->begun = true;
  Turn got = Turn::kDone;
  int code = 0;
  std::string why;
  held.unlock();
  try {
    got = body();
  } catch (const Failure& failure) {
    code = failure.code;
    why = failure.what();
  } catch (const std::exception& error) {
    code = kDeviceException;
    why = what + ": " + error.what();
    fault(why);
  }
  held.lock();
  running_ = false;
  if (code != 0) return failed(stream, code, why);
  if (got == Turn::kDone) return ended(stream);
  stream->tasks.front().body = std::move(body);
  if (got == Turn::kAgain) {
    stream->pause = 0;
    if (config().mode == Mode::kDelay) stream->due = now() + delay();
    return progress();
  }
  stream->pause = std::clamp(stream->pause * 2, kFirstPause, kLongestPause);
  stream->again = now() + stream->pause;
  stream->found = progress_;
}

void Engine::ended(Stream* stream) {
  stream->tasks.pop_front();
  ++stream->ended;
  stream->begun = false;
  stream->due = 0;
  stream->pause = 0;
  progress();
}

void Engine::failed(Stream* stream, int code, const std::string& why) {
  stream->error = code;
  stream->why = why;
  stream->ended = stream->issued;
  stream->tasks.clear();
  progress();
}

int64_t Engine::sleep() const {
  const int64_t at = now();
  int64_t least = kRest;
  for (const Stream* stream : order_) {
    if (!waits(*stream)) continue;
    int64_t until = std::max(stream->due, stream->found == progress_ ? stream->again : 0);
    if (config().mode == Mode::kLazy && !stream->begun && stream->ended >= stream->demanded) {
      const int64_t drift = std::max(last_call_ + config().idle, last_drift_ + kDrift);
      const int64_t neglected = stream->tasks.front().issued + kNeglect * config().idle;
      until = std::max(until, std::min(drift, neglected));
    }
    least = std::min(least, std::max<int64_t>(until - at, 1000));
  }
  return least;
}

int64_t Engine::delay() {
  const int64_t chosen = choose(1000) * config().longest_delay / 1000;
  if (tracing()) trace(text("a delay of %lld ns", static_cast<long long>(chosen)));
  return chosen;
}

uint32_t Engine::choose(uint32_t among) {
  if (among < 2) return 0;
  if (steered_) {  // when the choices are used up the first of what is possible runs
    return chosen_ < choices_.size() ? choices_[chosen_++] % among : 0;
  }
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return static_cast<uint32_t>((random_ >> 33) % among);
}

}  // namespace npusim
