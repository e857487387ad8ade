/* A host whose clock was set back: to be preloaded. While the file named by CLOCK_SHIFT_FILE exists, the clock that
   tells the time of day is a day behind; the monotonic clock is not touched, as adjtime(2) and date(1) leave it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define DAY 86400

static int is_set_back(void) {
  const char *file = getenv("CLOCK_SHIFT_FILE");
  return file != NULL && access(file, F_OK) == 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (real == NULL) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && is_set_back()) now->tv_sec -= DAY;
  return result;
}

int gettimeofday(struct timeval *now, void *zone) {
  static int (*real)(struct timeval *, void *);
  if (real == NULL) real = dlsym(RTLD_NEXT, "gettimeofday");
  int result = real(now, zone);
  if (result == 0 && is_set_back()) now->tv_sec -= DAY;
  return result;
}

time_t time(time_t *where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where != NULL) *where = now.tv_sec;
  return now.tv_sec;
}
