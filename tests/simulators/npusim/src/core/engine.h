// The one place where tasks run: which stream is next, and who waits for what.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "config.h"
#include "stream.h"

namespace npusim {

class Capture;

struct Task {
  std::string what;
  Body body;
  int64_t issued = 0;  // when
};

// A queue of tasks. Everything but the body of its head is guarded by the engine's lock.
struct Stream {
  int id = 0;
  int device = 0;
  std::deque<Task> tasks;
  uint64_t issued = 0;    // tasks ever put in
  uint64_t ended = 0;     // tasks that ran, or were dropped because the stream had failed
  uint64_t demanded = 0;  // lazy: somebody waits until so many have ended
  int64_t asked = 0;      // when somebody began to ask whether all of them have
  int64_t due = 0;        // delay: the head does not start before
  bool begun = false;     // the head has had a turn
  uint64_t found = 0;     // progress that had been made when the head was found blocked
  int64_t again = 0;      // when a blocked head is asked again even without progress
  int64_t pause = 0;      // how long it waited between the last two turns
  int error = 0;          // sticky: nothing runs any more
  std::string why;
  bool gone = false;      // destroyed by the program
  Capture* capture = nullptr;
};

using Lock = std::unique_lock<std::mutex>;

class Engine {
 public:
  static Engine& get();

  Lock lock();

  // Guarded by the lock:
  Stream* add(int device);
  void remove(Stream* stream);
  Stream* find(void* handle);        // null when there is no such stream; a fault says so
  Stream* get(void* handle);         // fails when there is no such stream
  Stream* standard(int device);      // the device's default stream
  std::vector<Stream*> on(int device);
  uint64_t put(Stream* stream, Task task);  // the task's place, counted from 1
  void demand(Stream* stream, uint64_t place);
  bool drained(Stream* stream);      // asked again and again, that is a demand
  void progress();                   // something has changed: blocked heads are asked again

  // Waits, without the lock meanwhile, until `ready` or for so many milliseconds (negative: for
  // ever). Returns whether `ready`. In an exploring schedule the waiting thread runs the tasks.
  bool wait(Lock& held, const std::function<bool()>& ready, int64_t milliseconds);

  // A call of the program: a lazy device does not move by itself for a while. Exploring, tasks of
  // the schedule's choice run here.
  void called();

  // The program has asked whether something has come, and it has not. Exploring, something moves:
  // who asks again and again must get an answer some day.
  void asked();

  // What the schedule chooses from, from now on (explore).
  void steer(std::vector<uint8_t> choices);

 private:
  Engine();
  void start();
  void work();
  void turns(Lock& held, uint32_t most);
  bool turn(Lock& held);  // one turn of one task, if any may run; false when none
  Stream* pick(int64_t at);
  Stream* explore(int64_t at);
  Stream* next(const std::function<bool(Stream&)>& may);
  bool may_run(Stream& stream, int64_t at);
  bool drifts(const Stream& stream, int64_t at);
  void run(Lock& held, Stream* stream);
  void ended(Stream* stream);
  void failed(Stream* stream, int code, const std::string& why);
  int64_t sleep() const;
  uint32_t choose(uint32_t among);
  int64_t delay();

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::map<Stream*, std::unique_ptr<Stream>> streams_;
  std::vector<Stream*> standard_;
  std::vector<Stream*> order_;   // by age; the next turn begins behind the last one
  size_t last_ = 0;
  uint64_t progress_ = 1;
  bool running_ = false;         // a body has a turn
  bool started_ = false;
  int64_t last_call_;
  int64_t last_drift_ = 0;
  int next_id_ = 0;
  uint64_t random_;
  std::vector<uint8_t> choices_;
  size_t chosen_ = 0;
  bool steered_ = false;
  int process_ = 0;
};

}  // namespace npusim
