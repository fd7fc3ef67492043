// What a correct program never causes: printed, kept in a file, and counted.
#pragma once

#include <string>

namespace npusim {

// Prints one line "npusim fault: ..." on standard error and appends it to the file that
// NPUSIM_FAULTS names. `python -m npusim` ends with an error when that file has a line.
void fault(const std::string& what);

// Prints one line when NPUSIM_TRACE is set: every call and every task.
void trace(const std::string& what);
bool tracing();

// The text behind aclGetRecentErrMsg: the last failure of the calling thread.
void remember_error(const std::string& what);
const char* recent_error();

// printf into a string.
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace npusim
