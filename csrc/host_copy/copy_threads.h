// Threads that copy host memory in the background.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host_copy/chunked_copies.h"

namespace equipoise {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// The numbers are what `_native.CopyTicket.wait` returns.
enum class CopyProgress : int { kPending, kDone, kAbandoned };

// Copies under way. All but `copies` is guarded by CopyQueue::mutex.
struct CopyJob {
    explicit CopyJob(ChunkedCopies what)
        : copies(std::move(what)), chunks_left(copies.chunks().size()) {}

    const ChunkedCopies copies;
    std::size_t next_chunk = 0;  // the next chunk to be taken by a thread
    std::size_t chunks_left;     // not copied yet
    CopyProgress progress = CopyProgress::kPending;
};

// What the threads share. Every thread and ticket holds it, so that it outlives CopyThreads: a
// thread that does not end in time is detached, and still uses it.
struct CopyQueue {
    std::mutex mutex;
    std::condition_variable wake;     // for threads: there is work, or they have to end
    std::condition_variable changed;  // for callers: a job or a thread has ended
    std::deque<std::shared_ptr<CopyJob>> waiting;   // jobs with chunks that no thread has taken
    std::vector<std::shared_ptr<CopyJob>> running;  // jobs with chunks that are not copied
    std::size_t alive = 0;                          // threads
    bool closing = false, stopping = false;         // no new jobs; no new chunks
    Clock::time_point free_at{};                    // when the rate admits the next chunk
};

// A submitted list of copies. May outlive CopyThreads.
class CopyTicket {
 public:
    CopyTicket(std::shared_ptr<CopyQueue> queue, std::shared_ptr<CopyJob> job)
        : queue_(std::move(queue)), job_(std::move(job)) {}

    // Waits until the job has ended, for `seconds` at most, and returns how far it is.
    CopyProgress wait(double seconds) const;

 private:
    std::shared_ptr<CopyQueue> queue_;
    std::shared_ptr<CopyJob> job_;
};

// May be used from any thread.
class CopyThreads {
 public:
    // Starts one thread for each list of CPUs that it may run on (an empty list: any). A chunk has
    // at most `chunk` bytes, a positive multiple of kCacheLine. All threads together begin at most
    // `rate` bytes per second; 0 means no limit. Throws std::system_error, and leaves no thread, if
    // one cannot be started or pinned.
    CopyThreads(const std::vector<std::vector<int>>& cpus, std::uintptr_t chunk, double rate);
    ~CopyThreads();
    CopyThreads(const CopyThreads&) = delete;
    CopyThreads& operator=(const CopyThreads&) = delete;

    // Begins to copy. The caller keeps the memory alive until the ticket is no longer pending.
    // Throws std::invalid_argument before any effect: as ChunkedCopies, if the copies clash with a
    // job that runs, and after close().
    CopyTicket submit(const std::vector<MemoryCopy>& copies);

    // Refuses new jobs, waits up to `seconds` for running ones, abandons the others and ends the
    // threads. Returns how many jobs were abandoned; no thread touches their memory any more.
    // Throws std::runtime_error if a thread is still in a chunk after kChunkSeconds more: the jobs
    // then stay pending, because their memory may still be written.
    std::size_t close(double seconds);

 private:
    void start_thread(const std::vector<int>& cpus);
    void finish_running(double seconds);
    void stop_threads();

    const std::uintptr_t chunk_bytes_, thread_count_;
    const double bytes_per_second_;
    const int owner_pid_;
    const std::shared_ptr<CopyQueue> queue_;
    std::mutex closing_;  // held for all of close(): two must not join the same threads
    std::vector<std::thread> threads_;
};

}  // namespace equipoise
