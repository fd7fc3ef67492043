#include "fault.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace npusim {
namespace {

thread_local std::string t_error;

void put(int descriptor, const std::string& line) {
  // One write, so that lines of several processes do not mix.
  if (write(descriptor, line.data(), line.size()) < 0) return;
}

}  // namespace

void fault(const std::string& what) {
  const std::string line = text("npusim fault: [%d] %s\n", getpid(), what.c_str());
  put(STDERR_FILENO, line);
  // Asked anew each time: a test may redirect it.
  const char* path = getenv("NPUSIM_FAULTS");
  if (path == nullptr || *path == '\0') return;
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  put(file, line);
  close(file);
}

bool tracing() {
  static const bool on = getenv("NPUSIM_TRACE") != nullptr;
  return on;
}

void trace(const std::string& what) {
  if (tracing()) put(STDERR_FILENO, text("npusim: [%d] %s\n", getpid(), what.c_str()));
}

void remember_error(const std::string& what) { t_error = what; }

const char* recent_error() { return t_error.c_str(); }

std::string text(const char* format, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  if (length < 0) return format;
  return std::string(buffer, std::min(static_cast<size_t>(length), sizeof(buffer) - 1));
}

}  // namespace npusim
