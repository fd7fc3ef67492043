#include "host_copy/copy_threads.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace equipoise {
namespace {

using Lock = std::unique_lock<std::mutex>;

// To hand less than this to another thread costs more than to copy it.
constexpr std::uintptr_t kSmallest = 1 << 16;
// A thread that is told to end ends after its chunk; one that takes this long will not end.
constexpr double kChunkSeconds = 10.0;
// A sleep of few microseconds lasts tens: what it overslept, chunks may catch up on, and no more.
constexpr double kCredit = 200e-6;
// What a wait may last: more would not fit the clock.
constexpr double kLongest = 1e8;

Clock::duration lasting(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(
        Seconds(std::clamp(seconds, 0.0, kLongest)));
}

// Makes what this thread has stored visible beyond the processor before anything it stores later:
// a device that reads memory after it saw, or was told, that a job has ended reads the copy. The
// mutex that a job ends under orders stores for other threads only, and neither stores that bypass
// the cache (a long memcpy, a write-combining mapping) nor another bus.
void publish() {
#if defined(__x86_64__)
    __asm__ __volatile__("sfence" ::: "memory");
#elif defined(__aarch64__)
    __asm__ __volatile__("dsb st" ::: "memory");
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// When a chunk may begin, so that `rate` holds over all threads. Time that nobody used is gone but
// for kCredit.
Clock::time_point reserve(Desk& desk, std::uintptr_t bytes, double rate) {
    const Clock::time_point begin = std::max(desk.free_at, Clock::now() - lasting(kCredit));
    desk.free_at = begin + lasting(static_cast<double>(bytes) / rate);
    return begin;
}

void finish(Desk& desk, const std::shared_ptr<Job>& job) {
    job->progress = Progress::kDone;
    auto& running = desk.running;
    running.erase(std::remove(running.begin(), running.end(), job), running.end());
    desk.ended.notify_all();
}

// One chunk; whether it was copied rather than given up.
bool serve(Desk& desk, Lock& lock, double rate) {
    const std::shared_ptr<Job> job = desk.queue.front();
    const Copy chunk = job->transfer.chunks()[job->next++];
    if (job->next == job->transfer.chunks().size()) desk.queue.pop_front();
    const auto stopping = [&] { return desk.stopping; };
    if (rate > 0.0) {
        const Clock::time_point begin = reserve(desk, chunk.bytes, rate);
        // To wait for what is past costs as much as a chunk: the mutex goes to another thread.
        if (begin > Clock::now() && desk.called.wait_until(lock, begin, stopping)) return false;
    }
    lock.unlock();
    std::memcpy(reinterpret_cast<void*>(chunk.destination),
                reinterpret_cast<const void*>(chunk.source), chunk.bytes);
    publish();
    // Who shares this processor comes first: nobody waits for a copy as for a forward.
    std::this_thread::yield();
    lock.lock();
    if (--job->left == 0) finish(desk, job);
    return true;
}

void run(const std::shared_ptr<Desk>& desk, double rate) {
    Lock lock(desk->mutex);
    while (true) {
        desk->called.wait(lock, [&] { return desk->stopping || !desk->queue.empty(); });
        if (desk->stopping || !serve(*desk, lock, rate)) break;
    }
    --desk->alive;
    desk->ended.notify_all();
}

}  // namespace

Progress Ticket::wait(double seconds) const {
    Lock lock(desk_->mutex);
    desk_->ended.wait_for(lock, lasting(seconds),
                          [&] { return job_->progress != Progress::kPending; });
    return job_->progress;
}

Copier::Copier(const std::vector<std::vector<int>>& cpus, std::uintptr_t chunk, double rate)
    : chunk_(chunk),
      count_(cpus.size()),
      rate_(rate),
      process_(getpid()),
      desk_(std::make_shared<Desk>()) {
    try {
        for (const std::vector<int>& allowed : cpus) start(allowed);
    } catch (...) {
        stop();
        for (std::thread& thread : threads_) thread.join();
        throw;
    }
}

Copier::~Copier() {
    if (getpid() != process_) {
        // Threads stay behind when a process forks, maybe with the mutex: nothing can be ended.
        new auto(std::move(threads_));
        return;
    }
    try {
        close(0.0);
    } catch (const std::runtime_error&) {
        // Detached by close; it holds the desk itself.
    }
}

void Copier::start(const std::vector<int>& cpus) {
    {
        const Lock lock(desk_->mutex);
        ++desk_->alive;
    }
    try {
        threads_.emplace_back(run, desk_, rate_);
    } catch (...) {
        const Lock lock(desk_->mutex);
        --desk_->alive;
        throw;
    }
    if (cpus.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
        if (cpu < 0 || cpu >= CPU_SETSIZE)
            throw std::system_error(EINVAL, std::generic_category(), "cpu " + std::to_string(cpu));
        CPU_SET(cpu, &set);
    }
    const int error = pthread_setaffinity_np(threads_.back().native_handle(), sizeof set, &set);
    if (error != 0) throw std::system_error(error, std::generic_category(), "pinning a thread");
}

Ticket Copier::submit(const std::vector<Copy>& copies) {
    std::uintptr_t total = 0;
    for (const Copy& copy : copies) total += copy.bytes;
    const std::uintptr_t each = total / count_ / kCacheLine * kCacheLine + kCacheLine;
    const auto chunk = std::min(chunk_, std::max(kSmallest, each));
    const auto job = std::make_shared<Job>(Transfer(copies, chunk));
    const Lock lock(desk_->mutex);
    if (desk_->closing) throw std::invalid_argument("the copier is closed");
    for (const auto& other : desk_->running)
        if (job->transfer.clashes_with(other->transfer))
            throw std::invalid_argument("one that still runs reads or writes the same memory");
    if (job->left == 0) {
        job->progress = Progress::kDone;
        return {desk_, job};
    }
    desk_->running.push_back(job);
    desk_->queue.push_back(job);
    desk_->called.notify_all();
    return {desk_, job};
}

std::size_t Copier::close(double seconds) {
    const Lock alone(closing_);
    run_out(seconds);
    stop();
    Lock lock(desk_->mutex);
    const bool over = desk_->ended.wait_for(lock, lasting(kChunkSeconds),
                                            [&] { return desk_->alive == 0; });
    const std::size_t left = desk_->running.size();
    if (over) {
        // Only now: until here a thread may have written to their memory.
        for (const auto& job : desk_->running) job->progress = Progress::kAbandoned;
        desk_->running.clear();
        desk_->ended.notify_all();
    }
    lock.unlock();
    for (std::thread& thread : threads_) over ? thread.join() : thread.detach();
    threads_.clear();
    if (!over) throw std::runtime_error("a thread of the copier does not end");
    return left;
}

void Copier::run_out(double seconds) {
    Lock lock(desk_->mutex);
    desk_->closing = true;
    desk_->ended.wait_for(lock, lasting(seconds), [&] { return desk_->running.empty(); });
}

void Copier::stop() {
    const Lock lock(desk_->mutex);
    desk_->closing = desk_->stopping = true;
    desk_->queue.clear();
    desk_->called.notify_all();
}

}  // namespace equipoise
