// Host functions as tasks of a stream: the stream waits until a thread of the host has run them.
#pragma once

#include <cstdint>

namespace npusim {

using HostFunction = void (*)(void*);

// The thread with this number runs what streams subscribed to it launch (aclrtProcessReport).
void subscribe(uint64_t thread, void* stream);
void unsubscribe(uint64_t thread, void* stream);
void launch_callback(HostFunction function, void* data, bool blocks, void* stream);
// Runs one on the calling thread; false when none came within so many milliseconds (-1: no limit).
bool process_report(int32_t milliseconds);
// The same on a thread of the driver's own (aclrtLaunchHostFunc).
void launch_host_function(HostFunction function, void* data, void* stream);

}  // namespace npusim
