#include "requests/router_state.h"

#include <algorithm>
#include <string>
#include <utility>

namespace equipoise::requests {
namespace {

const char* name_of(Stage stage) {
    switch (stage) {
        case Stage::pooled:
            return "pooled";
        case Stage::bound:
            return "bound";
        case Stage::running:
            return "running";
        default:
            return "gone";
    }
}

}  // namespace

RouterState::RouterState(std::size_t workers, std::int64_t slots, std::int64_t room,
                         std::int64_t front_ends, bool separates_oversize)
    : workers_(workers), front_ends_(front_ends), separates_oversize_(separates_oversize) {
    for (Worker& worker : workers_) {
        worker.assumed_front_ends = front_ends;
        worker.slots = std::min(slots, kUnlimited);
        worker.room = std::min(room, kUnlimited);
    }
    update_largest_room();
}

std::int32_t RouterState::arrive(Request request) {
    if (request.pinned >= 0 && !worker_at(request.pinned).serves())
        throw WorkerRefused("worker " + std::to_string(request.pinned) + " takes no requests");
    return add(std::move(request));
}

std::int32_t RouterState::adopt(Request request, std::int32_t w, std::int64_t made) {
    if (worker_at(w).lost())
        throw WorkerRefused("worker " + std::to_string(w) + " is lost: it has no requests");
    const std::int32_t r = add(std::move(request));
    bind(r, w);
    bindings_.pop_back();  // nobody has to send it
    if (made == 0) return r;
    Request& adopted = requests_[r];
    Worker& worker = workers_[w];
    adopted.stage = Stage::running;
    adopted.base = worker.ticks - made;
    worker.load += made;
    ++worker.running;
    ++worker.generating;
    ++running_;
    set_missing(adopted, 0);
    return r;
}

std::int32_t RouterState::add(Request request) {
    std::int32_t r = static_cast<std::int32_t>(requests_.size());
    if (spare_.empty()) {
        requests_.emplace_back();
    } else {
        r = spare_.back();
        spare_.pop_back();
    }
    request.stage = Stage::pooled;
    request.order = arrivals_++;
    requests_[r] = std::move(request);
    insert(r);
    return r;
}

void RouterState::start(std::int32_t r) {
    Request& request = at(r, Stage::bound, Stage::bound, "start");
    Worker& worker = workers_[request.worker];
    request.stage = Stage::running;
    // After a preemption it goes on with the tokens that it had.
    request.base = worker.ticks - request.made;
    worker.running += request.made == 0;
    running_ += request.made == 0;
    if (step_timer_ && request.made == 0)
        step_timer_->add_prompt(request.worker, request.missing, step_ - request.bound_step + 1);
    ++worker.generating;
    set_missing(request, 0);
}

void RouterState::pause(std::int32_t r) {
    Request& request = at(r, Stage::running, Stage::running, "pause");
    request.made = age(request);
    request.stage = Stage::bound;
    --workers_[request.worker].generating;
}

void RouterState::grow(std::int32_t r, std::int64_t tokens) {
    Request& request = at(r, Stage::bound, Stage::running, "grow");
    begin_step();
    if (request.stage == Stage::bound) {
        start(r);
        begins_at_once_ = request.bound_step == step_;
    }
    count_token(request);
    // As if the worker had ticked that much more for this request.
    request.base -= tokens;
    workers_[request.worker].load += tokens;
    made_ += tokens;
    if (step_end_ == StepEnd::tokens) pass_steps(tokens);
}

void RouterState::pass_steps(std::int64_t tokens) {
    step_tokens_ += tokens;
    step_ += step_tokens_ / running_;
    step_tokens_ %= running_;
}

void RouterState::tick(std::int32_t w) {
    Worker& worker = workers_[w];
    begin_step();
    ++worker.ticks;
    worker.load += worker.generating;
    made_ += worker.generating;
}

// Before the first token of a step changes the loads.
void RouterState::begin_step() {
    if (!step_timer_ || step_timer_->begun()) return;
    loads_.clear();
    for (const Worker& worker : workers_) loads_.push_back(worker.all_load());
    step_timer_->begin(loads_, running_ > 0);
}

void RouterState::count_token(Request& request) {
    if (step_end_ != StepEnd::all_told) return;
    step_has_tokens_ = true;
    token_time_ = now_;
    if (request.token_step == step_) return;  // bound within it, and counted then
    awaiting_token_ -= request.token_step == step_ - 1;
    request.token_step = step_;
    ++with_token_;
}

// As if it had a token in the step before the one in which it is expected to get its first.
void RouterState::expect(Request& request) {
    request.bound_step = step_has_tokens_ ? step_ + 1 : step_;
    if (step_end_ != StepEnd::all_told || !begins_at_once_) return;
    request.token_step = request.bound_step - 1;
    ++(step_has_tokens_ ? with_token_ : awaiting_token_);
}

void RouterState::count_end(std::int32_t r) {
    Request& request = at(r, Stage::pooled, Stage::running, "end");
    if (step_end_ == StepEnd::tokens)
        step_ += request.stage == Stage::running && age(request) <= 1;
    // While a step has no tokens, it is an end of the step before.
    if (step_has_tokens_ && request.stage == Stage::running && request.token_step != step_)
        count_token(request);
}

void RouterState::begin_event(const std::vector<std::int32_t>& requests) {
    const auto has_token_already = [this](std::int32_t r) {
        return requests_[r].token_step == step_ && requests_[r].stage == Stage::running;
    };
    const bool again = std::any_of(requests.begin(), requests.end(), has_token_already);
    overdue_ = again && awaiting_token_ > 0;
    if (again) end_step();
}

void RouterState::settle_step() {
    if (step_has_tokens_ && awaiting_token_ == 0) end_step();
}

// Requests with a token in this step are expected to get one in the next.
void RouterState::end_step() {
    if (step_timer_ && (step_has_tokens_ || step_end_ == StepEnd::caller))
        step_timer_->end(step_end_ == StepEnd::all_told ? token_time_ : now_);
    ++step_;
    awaiting_token_ = with_token_;
    with_token_ = 0;
    step_has_tokens_ = false;
}

std::int64_t RouterState::leave(std::int32_t r) {
    Request& request = at(r, Stage::pooled, Stage::running, "leave");
    const std::int64_t made = age(request);
    if (request.stage == Stage::pooled)
        unlink(request);
    else
        detach(r);
    request.stage = Stage::gone;
    request.hits.clear();
    spare_.push_back(r);
    return made;
}

std::int32_t RouterState::add_worker(std::int64_t slots, std::int64_t room) {
    Worker worker;
    worker.slots = std::min(slots, kUnlimited);
    worker.room = std::min(room, kUnlimited);
    worker.assumed_front_ends = front_ends_;
    workers_.push_back(worker);
    update_largest_room();
    return static_cast<std::int32_t>(workers_.size()) - 1;
}

void RouterState::set_state(std::int32_t w, WorkerState state) {
    Worker& worker = worker_at(w);
    if (worker.state == WorkerState::lost && state == WorkerState::draining)
        throw WorkerRefused("worker " + std::to_string(w) + " is lost: it has nothing to drain");
    worker.state = state;
    update_largest_room();
}

void RouterState::set_capacity(std::int32_t w, std::int64_t slots, std::int64_t room) {
    Worker& worker = worker_at(w);
    worker.slots = std::min(slots, kUnlimited);
    worker.room = std::min(room, kUnlimited);
    update_largest_room();
}

void RouterState::set_report(std::int32_t w, const WorkerReport& report) {
    Worker& worker = worker_at(w);
    worker.report = report;
    if (front_ends_ == 1) return;
    // The rest of what the worker reports belongs to other front ends. Our own part is known better
    // than the report knows it, which is older.
    worker.assumed_front_ends = 1;
    worker.others_load = std::max<std::int64_t>(0, report.tokens - worker.load);
    worker.others_count = std::max<std::int64_t>(0, report.waiting + report.running - worker.count);
}

void RouterState::lose_worker(std::int32_t w, std::vector<std::int32_t>& gone) {
    Worker& worker = worker_at(w);
    // A copy, because leave and detach change the list.
    const std::vector<std::int32_t> members = worker.members;
    for (const std::int32_t r : members) {
        const Request& request = requests_[r];
        if (request.stage == Stage::running || request.made > 0 || request.pinned >= 0) {
            leave(r);
            gone.push_back(r);
            continue;
        }
        detach(r);
        requests_[r].stage = Stage::pooled;
        insert(r);
    }
    lose_pinned_requests(w, gone);
    worker.state = WorkerState::lost;
    worker.report = {};
    worker.others_load = worker.others_count = 0;
    worker.assumed_front_ends = front_ends_;
    update_largest_room();
}

void RouterState::lose_pinned_requests(std::int32_t w, std::vector<std::int32_t>& gone) {
    for (std::int32_t r = pinned_.head; r >= 0;) {
        const std::int32_t next = requests_[r].next;
        if (requests_[r].pinned == w) {
            leave(r);
            gone.push_back(r);
        }
        r = next;
    }
}

void RouterState::bind(std::int32_t r, std::int32_t w) {
    Request& request = at(r, Stage::pooled, Stage::pooled, "bind");
    Worker& worker = workers_[w];
    unlink(request);
    request.stage = Stage::bound;
    request.worker = w;
    request.member_index = static_cast<std::int32_t>(worker.members.size());
    worker.members.push_back(r);
    worker.load += request.size;
    ++worker.count;
    set_missing(request, request.size - request.cached(w));
    expect(request);
    bindings_.push_back({r, w});
}

Worker& RouterState::worker_at(std::int32_t w) {
    if (w < 0 || static_cast<std::size_t>(w) >= workers_.size())
        throw WorkerRefused("no worker " + std::to_string(w) + ": there are " +
                            std::to_string(workers_.size()));
    return workers_[w];
}

const Request& RouterState::request_at(std::int32_t r) const {
    if (r < 0 || static_cast<std::size_t>(r) >= requests_.size() ||
        requests_[r].stage == Stage::gone)
        throw RequestRefused("no request " + std::to_string(r));
    return requests_[r];
}

std::int64_t RouterState::count_present() const {
    return std::count_if(workers_.begin(), workers_.end(),
                         [](const Worker& worker) { return !worker.lost(); });
}

// Clamped at every addition: a few unlimited capacities sum to more than 64 bits hold.
std::int64_t RouterState::free_slots() const {
    std::int64_t sum = 0;
    for (const Worker& worker : workers_) sum = std::min(sum + worker.free_slots(), kUnlimited);
    return sum;
}

std::int64_t RouterState::age(const Request& request) const {
    return request.stage == Stage::running ? workers_[request.worker].ticks - request.base
                                           : request.made;
}

void RouterState::require(std::int32_t r, Stage low, Stage high, const char* event) const {
    const Stage stage = request_at(r).stage;
    if (stage < low || stage > high)
        throw RequestRefused(std::string(event) + ": request " + std::to_string(r) + " is " +
                             name_of(stage));
}

Request& RouterState::at(std::int32_t r, Stage low, Stage high, const char* event) {
    require(r, low, high, event);
    return requests_[r];
}

void RouterState::insert(std::int32_t r) {
    Request& request = requests_[r];
    request.oversize = request.size > largest_room_;
    RequestList& list = list_of(request);
    // From the tail, which is where nearly all belong. Only requests that return from a lost
    // worker, or change lists, go further to the front.
    std::int32_t before = list.tail;
    while (before >= 0 && requests_[before].order > request.order)
        before = requests_[before].previous;
    request.previous = before;
    request.next = before < 0 ? list.head : requests_[before].next;
    (before < 0 ? list.head : requests_[before].next) = r;
    (request.next < 0 ? list.tail : requests_[request.next].previous) = r;
    ++list.size;
    list.tokens += request.size;
}

void RouterState::update_largest_room() {
    std::int64_t largest_room = separates_oversize_ ? -1 : kUnlimited;
    for (const Worker& worker : workers_)
        if (worker.serves()) largest_room = std::max(largest_room, worker.room);
    if (largest_room == largest_room_) return;
    largest_room_ = largest_room;
    // Collected first: moving a request changes the list that is walked.
    std::vector<std::int32_t> moved;
    for (const std::int32_t head : {pool_.head, oversize_.head})
        for (std::int32_t r = head; r >= 0; r = requests_[r].next)
            if (requests_[r].oversize != (requests_[r].size > largest_room_)) moved.push_back(r);
    for (const std::int32_t r : moved) {
        unlink(requests_[r]);
        insert(r);
    }
}

void RouterState::unlink(Request& request) {
    RequestList& list = list_of(request);
    (request.previous < 0 ? list.head : requests_[request.previous].next) = request.next;
    (request.next < 0 ? list.tail : requests_[request.next].previous) = request.previous;
    request.previous = request.next = -1;
    --list.size;
    list.tokens -= request.size;
}

void RouterState::set_missing(Request& request, std::int64_t missing) {
    workers_[request.worker].pending += missing - request.missing;
    request.missing = missing;
}

void RouterState::detach(std::int32_t r) {
    Request& request = requests_[r];
    Worker& worker = workers_[request.worker];
    with_token_ -= request.token_step == step_;
    awaiting_token_ -= request.token_step == step_ - 1;
    request.token_step = kNoStep;
    worker.load -= weight(request);
    const bool ran = request.stage == Stage::running || request.made > 0;
    worker.running -= ran;
    running_ -= ran;
    worker.generating -= request.stage == Stage::running;
    --worker.count;
    set_missing(request, 0);
    // The last member takes its place: O(1), and the order of members does not matter.
    const std::int32_t last = worker.members.back();
    worker.members[request.member_index] = last;
    requests_[last].member_index = request.member_index;
    worker.members.pop_back();
    request.worker = request.member_index = -1;
}

}  // namespace equipoise::requests
