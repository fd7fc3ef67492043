// Threads that copy host memory, beside whatever else the process does.
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

enum class CopyProgress : int { kPending, kDone, kAbandoned };

// A transfer under way. What is not const belongs to the copier's mutex.
struct CopyJob {
    explicit CopyJob(ChunkedCopies what)
        : copies(std::move(what)), chunks_left(copies.chunks().size()) {}

    const ChunkedCopies copies;
    std::size_t next_chunk = 0;
    std::size_t chunks_left;
    CopyProgress progress = CopyProgress::kPending;
};

// What the threads share. They hold it together, so that it outlives a thread that would not end.
struct CopyQueue {
    std::mutex mutex;
    // Somebody has work to take, or everybody is to end; a job or a thread has ended.
    std::condition_variable wake, changed;
    // With chunks that nobody has taken yet; with chunks that are not copied yet.
    std::deque<std::shared_ptr<CopyJob>> waiting;
    std::vector<std::shared_ptr<CopyJob>> running;
    std::size_t alive = 0;
    bool closing = false, stopping = false;
    Clock::time_point free_at{};
};

// A job in the hands of who asked for it; outlives the copier.
class CopyTicket {
 public:
    CopyTicket(std::shared_ptr<CopyQueue> queue, std::shared_ptr<CopyJob> job)
        : queue_(std::move(queue)), job_(std::move(job)) {}

    // How far the job is, after at most `seconds`, or once it has ended.
    CopyProgress wait(double seconds) const;

 private:
    std::shared_ptr<CopyQueue> queue_;
    std::shared_ptr<CopyJob> job_;
};

// Safe from any thread.
class CopyThreads {
 public:
    // One thread for each list of CPUs it may run on (any for an empty list). Chunks are of at most
    // `chunk` bytes, a positive multiple of kCacheLine; all threads together begin at most `rate`
    // bytes a second, where that is not 0. Raises std::system_error.
    CopyThreads(const std::vector<std::vector<int>>& cpus, std::uintptr_t chunk, double rate);
    ~CopyThreads();
    CopyThreads(const CopyThreads&) = delete;
    CopyThreads& operator=(const CopyThreads&) = delete;

    // Raises std::invalid_argument before any effect: as Transfer, when it clashes with a job that
    // runs, and after close.
    CopyTicket submit(const std::vector<MemoryCopy>& copies);

    // Takes nothing more, lets jobs end for up to `seconds`, gives up the others, ends the threads.
    // How many were given up by this call; nobody touches their memory any more. Raises
    // std::runtime_error if a thread is still within a chunk after kChunkSeconds more.
    std::size_t close(double seconds);

 private:
    void start_thread(const std::vector<int>& cpus);
    void finish_running(double seconds);
    void stop_threads();

    const std::uintptr_t chunk_bytes_, thread_count_;
    const double bytes_per_second_;
    const int owner_pid_;
    const std::shared_ptr<CopyQueue> queue_;
    std::mutex closing_;
    std::vector<std::thread> threads_;
};

}  // namespace equipoise
