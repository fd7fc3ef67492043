// What a prompt token weighs, fitted online to the times of steps as a front end sees them.
// docs/design/request-balance.md, "The weight is fitted", says what is seen and what is not.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace equipoise::requests {

// What a worker does in a step: KV tokens that it reads, and prompt tokens that it computes.
struct StepWork {
    double load = 0, prompt_tokens = 0;
};

// A step that is over: how long it took, and the work of the two workers of which one was the
// slowest: the one with the largest load, and the one that computed most.
struct TimedStep {
    double seconds;
    StepWork heaviest, computing;
};

// Least squares of seconds = fixed + per_load * (load + prompt_weight * prompt_tokens) of the
// slowest worker, over the latest steps.
class StepTimeFit {
 public:
    StepTimeFit();
    void add(const TimedStep& step);
    // KV tokens that are read in the time of computing one prompt token: 0 while that is not known,
    // or not surely worth anything. Changes only if the fit differs from it by more than a fifth.
    double prompt_weight() const { return prompt_weight_; }
    // KV tokens that are read in the part of a step that does not depend on work, as of the same
    // fit; 0 while the weight is 0.
    double fixed_load() const { return fixed_load_; }

 private:
    struct Estimate {
        double weight, error;  // a standard error
        double fixed_load;

        bool counts() const;
    };
    // A step as one pass of the fit reads it.
    struct Row {
        StepWork work;  // of the slowest worker, by the weight of the pass before
        double seconds, importance;
    };
    struct Moments;

    std::optional<Estimate> estimate();
    std::optional<Estimate> solve(const Moments& moments) const;
    bool neighbours_differ(double per_load) const;

    std::vector<TimedStep> steps_;  // the latest, as a ring
    std::vector<Row> rows_;         // of one estimate
    std::int64_t added_ = 0, next_estimate_;
    double prompt_weight_ = 0, fixed_load_ = 0;
};

// Puts timed steps together from events: the loads when a step begins, prompts when their first
// token comes, which may be steps after the engine began with them, and the time of the step's end.
class StepTimer {
 public:
    StepTimer();
    bool begun() const { return begun_; }
    // The step has its first token. `loads`: by worker. `comparable`: something ran before it, so
    // that the time since the last end is that of one step.
    void begin(const std::vector<std::int64_t>& loads, bool comparable);
    // The first token of a request that `worker` computed in the present step and, if it has more
    // tokens than fit into one, in up to `steps` - 1 before.
    void add_prompt(std::int32_t worker, std::int64_t tokens, std::int64_t steps);
    // The step was over at `now`, in seconds; not a number where there is no clock.
    void end(double now);
    double prompt_weight() const { return fit_.prompt_weight(); }
    double fixed_load() const { return fit_.fixed_load(); }

 private:
    struct Step {
        double seconds = 0;  // 0: cannot be compared
        std::vector<std::int64_t> loads, prompt_tokens;  // by worker
    };

    // Steps of which a prompt may still turn out to have been computed in them.
    static constexpr std::int64_t kOpenSteps = 16;

    Step& step_before(std::int64_t age);
    void close(const Step& step);

    StepTimeFit fit_;
    std::array<Step, kOpenSteps> open_;
    std::int64_t step_ = kOpenSteps;  // the present one
    double last_end_;
    bool begun_ = false, comparable_ = false;
};

}  // namespace equipoise::requests
