// What one front end knows of its workers and requests. docs/design/request-balance.md defines the
// words. Only RouterState writes to the types below, except that policies add their own picks to
// reports.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "requests/step_time_fit.h"

namespace equipoise::requests {

// A capacity without bound. An eighth of the largest number, so that sums of a few do not overflow.
constexpr std::int64_t kUnlimited = INT64_MAX / 8;

// No step, and not the one before the first.
constexpr std::int64_t kNoStep = -2;

enum class WorkerState : std::uint8_t { serving, draining, lost };
// In order of a request's life, so that a range of stages can be required.
enum class Stage : std::uint8_t { gone, pooled, bound, running };

// Thrown if a call cannot be right: for settings, for a request, for a worker. Nothing has changed
// then.
struct RouterError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};
struct RequestRefused : RouterError {
    using RouterError::RouterError;
};
struct WorkerRefused : RouterError {
    using RouterError::RouterError;
};

// What a worker reports, over the requests of all front ends. `tokens`: in its KV cache, and in
// prompts that wait.
struct WorkerReport {
    std::int64_t waiting = 0, running = 0, tokens = 0;
    double kv_usage = 0;
};

struct Worker {
    WorkerState state = WorkerState::serving;
    std::int64_t slots = kUnlimited, room = kUnlimited;
    std::int64_t load = 0;     // KV tokens of this front end's requests, running or waiting there
    std::int64_t count = 0;    // those requests
    std::int64_t running = 0;  // of those, with a first token
    std::int64_t generating = 0;  // of those, not preempted: each tick adds a token to each
    std::int64_t pending = 0;     // prompt tokens to compute, of requests without a first token
    std::int64_t ticks = 0;       // steps so far: a tick costs O(1), not a write to every request
    // Requests of other front ends: by the last report; before the first, as many as ours on each.
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
    std::int32_t pinned = -1;               // the only worker that may serve it, or -1
    std::int32_t previous = -1, next = -1;  // in its list
    std::int32_t member_index = -1;         // in its worker's members
    std::int64_t missing = 0;               // prompt tokens to compute, while it is bound
    bool oversize = false;                  // larger than the room of every serving worker
    std::int64_t size = 0;
    std::int64_t expected = -1;      // output tokens, if an oracle knows them
    std::int64_t base = 0;           // while it runs: tokens made = its worker's ticks - base
    std::int64_t made = 0;           // while it does not run: tokens made
    std::int64_t order = 0;          // of arrival
    std::int64_t first_seen = -1;    // step at which it came into a policy's window
    std::int64_t token_step = kNoStep;  // step of its latest token
    std::int64_t bound_step = 0;        // the first step that may bring it a token
    std::vector<std::int32_t> hits;  // cached tokens by worker, or empty

    std::int64_t hit(std::int32_t w) const {
        return static_cast<std::size_t>(w) < hits.size() ? hits[static_cast<std::size_t>(w)] : 0;
    }
    std::int64_t cached(std::int32_t w) const { return hit(w) < size ? hit(w) : size; }
};

// Requests by order of arrival: a linked list through the slab, so that any of them leaves in O(1).
struct RequestList {
    std::int32_t head = -1, tail = -1;
    std::int64_t size = 0, tokens = 0;  // requests, and the sum of their sizes
};

// What ends a step.
enum class StepEnd : std::uint8_t {
    all_told,  // the tokens that requests are told to have made, of workers that meet at a barrier
    tokens,  // as many tokens as requests run: workers without a barrier
    caller,  // end_step only: a simulation knows
};

struct Binding {
    std::int32_t request, worker;
};

class RouterState {
 public:
    // `separates_oversize`: keeps requests that are larger than the room of every serving worker
    // out of the pool until a worker has the room. Policies look at the first requests of the pool
    // only, and would see no others behind these.
    RouterState(std::size_t workers, std::int64_t slots, std::int64_t room, std::int64_t front_ends,
                bool separates_oversize);

    // Events. Each throws RequestRefused or WorkerRefused, and changes nothing, if it cannot happen
    // now.
    std::int32_t arrive(Request request);
    // A request that worker `w` has already, with `made` tokens: told by a caller that had another
    // policy before. It need not have a slot free, nor serve.
    std::int32_t adopt(Request request, std::int32_t w, std::int64_t made);
    void start(std::int32_t request);
    // Its worker has preempted it and put it back into its queue. Front ends of real engines are
    // not told of that, and only see that no tokens come: so it keeps its tokens and its load, and
    // only stops growing with the worker's ticks.
    void pause(std::int32_t request);
    void grow(std::int32_t request, std::int64_t tokens);
    // Every generating request of the worker made one token.
    void tick(std::int32_t worker);
    // The request ended or was aborted. Returns the tokens that it had made.
    std::int64_t leave(std::int32_t request);
    // Throws unless the request's stage is in [low, high].
    void require(std::int32_t request, Stage low, Stage high, const char* event) const;
    std::int32_t add_worker(std::int64_t slots, std::int64_t room);
    void set_state(std::int32_t worker, WorkerState state);
    void set_capacity(std::int32_t worker, std::int64_t slots, std::int64_t room);
    void set_report(std::int32_t worker, const WorkerReport& report);
    // The worker is lost. Requests that have run, or are pinned to it, are gone with it and
    // appended to `gone`. The others return to the pool, in their old order.
    void lose_worker(std::int32_t worker, std::vector<std::int32_t>& gone);

    // Steps. The workers meet at a barrier in each, and each running request makes its tokens; but
    // events bring the tokens of a step one after the other, and half of them are no ground for a
    // decision. A step is over when all requests with a token in the step before have one in this,
    // or have left; or when one of them gets a second. So nobody waits for a worker that is stuck,
    // or has preempted a request: the decision comes with the second token. A request that was just
    // bound counts as having had a token in the step before, if the request that began last had its
    // first token at once: prompts may take several steps.
    // Without a barrier (`StepEnd::tokens`) only waiting is counted in steps: of as many tokens as
    // requests run. Where no tokens are told, ends alone tell that time passes; the end of a request
    // that had its first token only counts as a step.
    std::int64_t steps() const { return step_; }
    // Some requests have a token in this step, and others are expected to get one.
    bool mid_step() const { return !overdue_ && step_has_tokens_ && awaiting_token_ > 0; }
    void end_step();
    // Ends the step if all requests that are expected to have a token in it.
    void settle_step();
    // An event brings tokens of these requests, all of one step.
    void begin_event(const std::vector<std::int32_t>& requests);
    // The request ends, which stands for a token if it has none in this step.
    void count_end(std::int32_t request);
    void set_step_end(StepEnd step_end) { step_end_ = step_end; }

    // From now on the times of steps are looked at. The time is that of the events that follow, in
    // seconds of a clock that only goes forward.
    void time_steps() { step_timer_.emplace(); }
    void set_time(double now) { now_ = now; }
    // What a prompt token weighs by the times of steps, and the part of a step that depends on
    // nothing, both in KV tokens read; 0 while that is not known.
    double fitted_prompt_weight() const { return step_timer_ ? step_timer_->prompt_weight() : 0; }
    double fitted_fixed_load() const { return step_timer_ ? step_timer_->fixed_load() : 0; }

    // The only way for a request to get to a worker.
    void bind(std::int32_t request, std::int32_t worker);
    std::vector<Binding>& bindings() { return bindings_; }

    std::size_t size() const { return workers_.size(); }
    // Workers that are not lost: those that meet at the barrier of each step.
    std::int64_t count_present() const;
    // Free slots of all workers, kUnlimited at most.
    std::int64_t free_slots() const;
    // Tokens made by all requests so far.
    std::int64_t made() const { return made_; }
    const Worker& worker(std::size_t w) const { return workers_[w]; }
    Worker& worker_at(std::int32_t w);
    const Request& request(std::int32_t r) const { return requests_[r]; }
    const Request& request_at(std::int32_t r) const;
    void mark_seen(std::int32_t r) { requests_[r].first_seen = step_; }
    std::int64_t age(const Request& request) const;
    std::int64_t weight(const Request& r) const { return r.size + age(r); }
    bool fits(const Worker& worker, const Request& request) const {
        return worker.free_slots() > 0 && worker.all_load() + request.size <= worker.room;
    }

    // The pool: requests that any worker may serve; and those pinned to one worker.
    std::int32_t first() const { return pool_.head; }
    std::int64_t pooled() const { return pool_.size; }
    std::int64_t pooled_tokens() const { return pool_.tokens; }
    std::int64_t oversize() const { return oversize_.size; }
    std::int32_t first_pinned() const { return pinned_.head; }
    std::int64_t pinned() const { return pinned_.size; }
    std::int32_t after(std::int32_t r) const { return requests_[r].next; }

 private:
    void begin_step();
    void count_token(Request& request);
    void pass_steps(std::int64_t tokens);
    void expect(Request& request);
    Request& at(std::int32_t r, Stage low, Stage high, const char* event);
    RequestList& list_of(const Request& request) {
        if (request.pinned >= 0) return pinned_;
        return request.oversize ? oversize_ : pool_;
    }
    std::int32_t add(Request request);
    void insert(std::int32_t r);
    void update_largest_room();
    void lose_pinned_requests(std::int32_t worker, std::vector<std::int32_t>& gone);
    void unlink(Request& request);
    void detach(std::int32_t r);
    void set_missing(Request& request, std::int64_t missing);

    std::vector<Worker> workers_;
    std::vector<Request> requests_;
    std::vector<std::int32_t> spare_;  // handles of requests that are gone, to be used again
    std::vector<Binding> bindings_;
    RequestList pool_, pinned_, oversize_;
    std::int64_t arrivals_ = 0, made_ = 0, front_ends_;
    // Steps that are over; requests with a token in the present one, and those that are expected to
    // get one; whether any has; whether the latest event ended a step without the token of some;
    // and whether requests get a token in the first step after they were bound.
    std::int64_t step_ = 0, with_token_ = 0, awaiting_token_ = 0;
    bool step_has_tokens_ = false, overdue_ = false, begins_at_once_ = true;
    StepEnd step_end_ = StepEnd::all_told;
    std::optional<StepTimer> step_timer_;
    std::vector<std::int64_t> loads_;  // for it, by worker
    // The time of the present event, and of the latest one with a token.
    double now_ = std::numeric_limits<double>::quiet_NaN(), token_time_ = now_;
    // Requests that run; tokens since the latest step ended, without a barrier.
    std::int64_t running_ = 0, step_tokens_ = 0;
    std::int64_t largest_room_ =
        kUnlimited;  // of serving workers, if oversize requests are separated
    bool separates_oversize_;
};

}  // namespace equipoise::requests
