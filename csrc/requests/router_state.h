// What one front end knows of its workers and requests. The words stand in
// docs/design/request-balance.md; nobody but Fleet writes to what is here.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace equipoise::requests {

// A capacity that nothing reaches; sums of a few of them do not overflow.
constexpr std::int64_t kUnlimited = INT64_MAX / 8;

enum class WorkerState : std::uint8_t { serving, draining, lost };
enum class Stage : std::uint8_t { gone, pooled, bound, running };

// Raised for what a caller says that cannot be so: of settings, of a request, of a worker.
struct RouterError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};
struct RequestRefused : RouterError {
    using RouterError::RouterError;
};
struct WorkerRefused : RouterError {
    using RouterError::RouterError;
};

// What a worker says of itself, of the requests of all front ends. `tokens`: in its KV cache, and
// prompts that wait.
struct WorkerReport {
    std::int64_t waiting = 0, running = 0, tokens = 0;
    double kv_usage = 0;
};

struct Worker {
    WorkerState state = WorkerState::serving;
    std::int64_t slots = kUnlimited, room = kUnlimited;
    std::int64_t load = 0;     // KV tokens of this front end's requests, those that wait there too
    std::int64_t count = 0;    // of its requests
    std::int64_t running = 0;  // of those, with a token
    std::int64_t generating =
        0;                     // of those, that make one with every tick: not put back into a queue
    std::int64_t pending = 0;  // prompt tokens to compute, of the others
    std::int64_t ticks = 0;    // tokens made by a request that has run from the beginning
    // Other front ends' part: by the last report, or, before the first, as much as ours for each.
    std::int64_t others_load = 0, others_count = 0, assumed_front_ends = 1;
    WorkerReport report;
    std::vector<std::int32_t> members;

    std::int64_t all_load() const { return load * assumed_front_ends + others_load; }
    std::int64_t all_count() const { return count * assumed_front_ends + others_count; }
    std::int64_t all_pending() const { return pending * assumed_front_ends; }
    bool serves() const { return state == WorkerState::serving; }
    bool lost() const { return state == WorkerState::lost; }
    std::int64_t free_slots() const {
        const std::int64_t left = slots - all_count();
        return serves() && left > 0 ? left : 0;
    }
};

struct Request {
    Stage stage = Stage::gone;
    std::int32_t worker = -1;
    std::int32_t pinned = -1;               // the only worker that may serve it
    std::int32_t previous = -1, next = -1;  // in the pool
    std::int32_t member_index = -1;         // among its worker's members
    std::int64_t missing = 0;               // prompt tokens to compute, while it is bound
    bool oversize = false;                  // no worker that serves could ever hold it
    std::int64_t size = 0;
    std::int64_t expected = -1;      // output tokens, of an oracle
    std::int64_t base = 0;           // its worker's ticks when it had made no token
    std::int64_t made = 0;           // tokens, while it does not run
    std::int64_t order = 0;          // of arrival
    std::int64_t first_seen = -1;    // decision at which it came into a policy's window
    std::vector<std::int32_t> hits;  // cached tokens by worker, or empty

    std::int64_t hit(std::int32_t w) const {
        return static_cast<std::size_t>(w) < hits.size() ? hits[static_cast<std::size_t>(w)] : 0;
    }
    std::int64_t cached(std::int32_t w) const { return hit(w) < size ? hit(w) : size; }
};

// Requests in order, as a list through the slab.
struct RequestList {
    std::int32_t head = -1, tail = -1;
    std::int64_t size = 0;
};

struct Binding {
    std::int32_t request, worker;
};

class RouterState {
 public:
    // `strands`: what is larger than every serving worker's room is kept out of the pool until one
    // has the room, else whoever looks at the first of the pool only would see nobody else.
    RouterState(std::size_t workers, std::int64_t slots, std::int64_t room, std::int64_t front_ends,
                bool separates_oversize);

    // Events. Each raises RequestRefused or WorkerRefused where it cannot happen in the state that
    // things are in.
    std::int32_t arrive(Request request);
    void start(std::int32_t request);
    // Its worker has put it back into its queue. Front ends are not told of that: what they know of
    // it stays, but that it makes tokens.
    void pause(std::int32_t request);
    void grow(std::int32_t request, std::int64_t tokens);
    void tick(std::int32_t worker);  // every running request of it made one token
    std::int64_t leave(std::int32_t request);
    void require(std::int32_t request, Stage low, Stage high, const char* event) const;
    std::int32_t add_worker(std::int64_t slots, std::int64_t room);
    void set_state(std::int32_t worker, WorkerState state);
    void set_capacity(std::int32_t worker, std::int64_t slots, std::int64_t room);
    void set_report(std::int32_t worker, const WorkerReport& report);
    // The requests of a worker that is lost: those that have run and those that are pinned to it
    // are gone and appended to `gone`, the others are in the pool again, in their old order.
    void lose_worker(std::int32_t worker, std::vector<std::int32_t>& gone);

    // The only way on to a worker.
    void bind(std::int32_t request, std::int32_t worker);
    std::vector<Binding>& bindings() { return bindings_; }

    std::size_t size() const { return workers_.size(); }
    std::int64_t count_present()
        const;                        // workers that are not lost: those that meet at the barrier
    std::int64_t free_slots() const;  // slots of all, kUnlimited at most
    std::int64_t made() const { return made_; }  // tokens, of all requests so far
    const Worker& worker(std::size_t w) const { return workers_[w]; }
    Worker& worker_at(std::int32_t w);
    const Request& request(std::int32_t r) const { return requests_[r]; }
    const Request& request_at(std::int32_t r) const;
    void mark_seen(std::int32_t r, std::int64_t decision) { requests_[r].first_seen = decision; }
    std::int64_t age(const Request& request) const;
    std::int64_t weight(const Request& r) const { return r.size + age(r); }
    bool fits(const Worker& worker, const Request& request) const {
        return worker.free_slots() > 0 && worker.all_load() + request.size <= worker.room;
    }

    // The pool: what any worker may serve, and what waits for its own.
    std::int32_t first() const { return pool_.head; }
    std::int64_t pooled() const { return pool_.size; }
    std::int64_t oversize() const { return oversize_.size; }
    std::int32_t first_pinned() const { return pinned_.head; }
    std::int64_t pinned() const { return pinned_.size; }
    std::int32_t after(std::int32_t r) const { return requests_[r].next; }

 private:
    Request& at(std::int32_t r, Stage low, Stage high, const char* event);
    RequestList& list_of(const Request& request) {
        if (request.pinned >= 0) return pinned_;
        return request.oversize ? oversize_ : pool_;
    }
    void insert(std::int32_t r);  // by order
    void update_largest_room();   // workers have changed
    void lose_pinned_requests(std::int32_t worker, std::vector<std::int32_t>& gone);
    void unlink(Request& request);
    void detach(std::int32_t r);
    void set_missing(Request& request, std::int64_t missing);  // so much is to be computed

    std::vector<Worker> workers_;
    std::vector<Request> requests_;
    std::vector<std::int32_t> spare_;
    std::vector<Binding> bindings_;
    RequestList pool_, pinned_, oversize_;
    std::int64_t arrivals_ = 0, made_ = 0, front_ends_;
    std::int64_t largest_room_ = kUnlimited;  // of workers that serve, where requests are stranded
    bool separates_oversize_;
};

}  // namespace equipoise::requests
