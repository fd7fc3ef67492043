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

// Smallest chunk: handing less to another thread costs more than copying it.
constexpr std::uintptr_t kMinChunk = 1 << 16;
// How long close() waits for threads to finish their chunks. One that takes longer will not end.
constexpr double kChunkSeconds = 10.0;
// How much a chunk may begin before its time, to make up for a sleep that lasted too long: one of a
// few microseconds lasts tens. No more, so that time that nobody used is not turned into a burst.
constexpr double kMaxCatchUp = 200e-6;
// Longest wait, in seconds: more overflows the nanoseconds of the clock.
constexpr double kMaxWait = 1e8;

Clock::duration to_duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(Seconds(std::clamp(seconds, 0.0, kMaxWait)));
}

// Makes all stores of this thread visible to devices before any later store: a device that is told
// that a job has ended must read the copy. The mutex that a job ends under orders stores for other
// threads only. It orders neither stores that bypass the cache (a long memcpy, a write-combining
// mapping) nor what another bus sees.
void make_stores_visible() {
#if defined(__x86_64__)
    __asm__ __volatile__("sfence" ::: "memory");
#elif defined(__aarch64__)
    __asm__ __volatile__("dsb st" ::: "memory");
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// Returns when a chunk may begin, and reserves its time, so that `rate` holds over all threads
// together.
Clock::time_point reserve_time(CopyQueue& queue, std::uintptr_t bytes, double rate) {
    const Clock::time_point begin =
        std::max(queue.free_at, Clock::now() - to_duration(kMaxCatchUp));
    queue.free_at = begin + to_duration(static_cast<double>(bytes) / rate);
    return begin;
}

// Called with the mutex held.
void finish_job(CopyQueue& queue, const std::shared_ptr<CopyJob>& job) {
    job->progress = CopyProgress::kDone;
    auto& running = queue.running;
    running.erase(std::remove(running.begin(), running.end(), job), running.end());
    queue.changed.notify_all();
}

// Takes and copies one chunk. The lock is held on entry and on return, and released for the copy.
// Returns false if the threads were stopped first; the job then stays in `running`, and close()
// abandons it.
bool copy_chunk(CopyQueue& queue, Lock& lock, double rate) {
    const std::shared_ptr<CopyJob> job = queue.waiting.front();
    const MemoryCopy chunk = job->copies.chunks()[job->next_chunk++];
    if (job->next_chunk == job->copies.chunks().size()) queue.waiting.pop_front();
    const auto stopping = [&] { return queue.stopping; };
    if (rate > 0.0) {
        const Clock::time_point begin = reserve_time(queue, chunk.bytes, rate);
        // No wait for a time that is past: it would release the mutex to another thread, which
        // costs as much as a chunk.
        if (begin > Clock::now() && queue.wake.wait_until(lock, begin, stopping)) return false;
    }
    lock.unlock();
    std::memcpy(reinterpret_cast<void*>(chunk.destination),
                reinterpret_cast<const void*>(chunk.source), chunk.bytes);
    make_stores_visible();
    // Other threads of this processor come first: a forward pass is waited for, a copy is not.
    std::this_thread::yield();
    lock.lock();
    if (--job->chunks_left == 0) finish_job(queue, job);
    return true;
}

void run_thread(const std::shared_ptr<CopyQueue>& queue, double rate) {
    Lock lock(queue->mutex);
    while (true) {
        queue->wake.wait(lock, [&] { return queue->stopping || !queue->waiting.empty(); });
        if (queue->stopping || !copy_chunk(*queue, lock, rate)) break;
    }
    // close() waits for this to be 0 before it says that memory is free.
    --queue->alive;
    queue->changed.notify_all();
}

}  // namespace

CopyProgress CopyTicket::wait(double seconds) const {
    Lock lock(queue_->mutex);
    queue_->changed.wait_for(lock, to_duration(seconds),
                             [&] { return job_->progress != CopyProgress::kPending; });
    return job_->progress;
}

CopyThreads::CopyThreads(const std::vector<std::vector<int>>& cpus, std::uintptr_t chunk,
                         double rate)
    : chunk_bytes_(chunk),
      thread_count_(cpus.size()),
      bytes_per_second_(rate),
      owner_pid_(getpid()),
      queue_(std::make_shared<CopyQueue>()) {
    try {
        for (const std::vector<int>& allowed : cpus) start_thread(allowed);
    } catch (...) {
        stop_threads();
        for (std::thread& thread : threads_) thread.join();
        throw;
    }
}

CopyThreads::~CopyThreads() {
    if (getpid() != owner_pid_) {
        // In a forked child the threads do not exist, and one of them may have held the mutex:
        // nothing can be ended or locked. Leaked, because the destructor of a joinable std::thread
        // ends the process.
        new auto(std::move(threads_));
        return;
    }
    try {
        close(0.0);
    } catch (const std::runtime_error&) {
        // A thread hangs. close() has detached it, and it holds the queue itself.
    }
}

void CopyThreads::start_thread(const std::vector<int>& cpus) {
    {
        // Counted before it runs: close() must not miss a thread that has not begun.
        const Lock lock(queue_->mutex);
        ++queue_->alive;
    }
    try {
        threads_.emplace_back(run_thread, queue_, bytes_per_second_);
    } catch (...) {
        const Lock lock(queue_->mutex);
        --queue_->alive;
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

CopyTicket CopyThreads::submit(const std::vector<MemoryCopy>& copies) {
    std::uintptr_t total = 0;
    for (const MemoryCopy& copy : copies) total += copy.bytes;
    // As many chunks as threads at least, where the copies are large enough for that.
    const std::uintptr_t each = total / thread_count_ / kCacheLine * kCacheLine + kCacheLine;
    const auto chunk = std::min(chunk_bytes_, std::max(kMinChunk, each));
    // Checked and cut before the lock is taken: that takes long for many copies.
    const auto job = std::make_shared<CopyJob>(ChunkedCopies(copies, chunk));
    const Lock lock(queue_->mutex);
    if (queue_->closing) throw std::invalid_argument("the copy threads are closed");
    for (const auto& other : queue_->running)
        if (job->copies.clashes_with(other->copies))
            throw std::invalid_argument("one that still runs reads or writes the same memory");
    if (job->chunks_left == 0) {
        job->progress = CopyProgress::kDone;
        return {queue_, job};
    }
    queue_->running.push_back(job);
    queue_->waiting.push_back(job);
    queue_->wake.notify_all();
    return {queue_, job};
}

std::size_t CopyThreads::close(double seconds) {
    const Lock alone(closing_);
    finish_running(seconds);
    stop_threads();
    Lock lock(queue_->mutex);
    const bool over = queue_->changed.wait_for(lock, to_duration(kChunkSeconds),
                                               [&] { return queue_->alive == 0; });
    const std::size_t abandoned = queue_->running.size();
    if (over) {
        // Only now: until all threads had ended, one may have written to their memory.
        for (const auto& job : queue_->running) job->progress = CopyProgress::kAbandoned;
        queue_->running.clear();
        queue_->changed.notify_all();
    }
    // Without the lock, so that tickets can be asked meanwhile.
    lock.unlock();
    for (std::thread& thread : threads_) over ? thread.join() : thread.detach();
    threads_.clear();
    if (!over) throw std::runtime_error("a copy thread does not end");
    return abandoned;
}

void CopyThreads::finish_running(double seconds) {
    Lock lock(queue_->mutex);
    queue_->closing = true;
    queue_->changed.wait_for(lock, to_duration(seconds), [&] { return queue_->running.empty(); });
}

void CopyThreads::stop_threads() {
    const Lock lock(queue_->mutex);
    queue_->closing = queue_->stopping = true;
    queue_->waiting.clear();
    queue_->wake.notify_all();
}

}  // namespace equipoise
