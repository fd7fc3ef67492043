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

enum class Progress : int { kPending, kDone, kAbandoned };

// A transfer under way. What is not const belongs to the copier's mutex.
struct Job {
    explicit Job(Transfer what) : transfer(std::move(what)), left(transfer.chunks().size()) {}

    const Transfer transfer;
    std::size_t next = 0;
    std::size_t left;
    Progress progress = Progress::kPending;
};

// What the threads share. They hold it together, so that it outlives a thread that would not end.
struct Desk {
    std::mutex mutex;
    // Somebody has work to take, or everybody is to end; a job or a thread has ended.
    std::condition_variable called, ended;
    // With chunks that nobody has taken yet; with chunks that are not copied yet.
    std::deque<std::shared_ptr<Job>> queue;
    std::vector<std::shared_ptr<Job>> running;
    std::size_t alive = 0;
    bool closing = false, stopping = false;
    Clock::time_point free_at{};
};

// A job in the hands of who asked for it; outlives the copier.
class Ticket {
 public:
    Ticket(std::shared_ptr<Desk> desk, std::shared_ptr<Job> job)
        : desk_(std::move(desk)), job_(std::move(job)) {}

    // How far the job is, after at most `seconds`, or once it has ended.
    Progress wait(double seconds) const;

 private:
    std::shared_ptr<Desk> desk_;
    std::shared_ptr<Job> job_;
};

// Safe from any thread.
class Copier {
 public:
    // One thread for each list of CPUs it may run on (any for an empty list). Chunks are of at most
    // `chunk` bytes, a positive multiple of kCacheLine; all threads together begin at most `rate`
    // bytes a second, where that is not 0. Raises std::system_error.
    Copier(const std::vector<std::vector<int>>& cpus, std::uintptr_t chunk, double rate);
    ~Copier();
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // Raises std::invalid_argument before any effect: as Transfer, when it clashes with a job that
    // runs, and after close.
    Ticket submit(const std::vector<Copy>& copies);

    // Takes nothing more, lets jobs end for up to `seconds`, gives up the others, ends the threads.
    // How many were given up by this call; nobody touches their memory any more. Raises
    // std::runtime_error if a thread is still within a chunk after kChunkSeconds more.
    std::size_t close(double seconds);

 private:
    void start(const std::vector<int>& cpus);
    void run_out(double seconds);
    void stop();

    const std::uintptr_t chunk_, count_;
    const double rate_;
    const int process_;
    const std::shared_ptr<Desk> desk_;
    std::mutex closing_;
    std::vector<std::thread> threads_;
};

}  // namespace equipoise
