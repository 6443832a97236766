// Franz reads one partition with franz-go, from an offset to an end: BOOTSTRAP ISOLATION TOPIC PARTITION START END. Each record is printed as
// "OFFSET KEY VALUE", in hexadecimal with an "x" before it, or "-" for null; then "end".
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

func hex(data []byte) string {
	if data == nil {
		return "-"
	}
	return fmt.Sprintf("x%x", data)
}

func number(text string) int64 {
	value, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	isolation := kgo.ReadUncommitted()
	if os.Args[2] == "read_committed" {
		isolation = kgo.ReadCommitted()
	}
	topic, partition, start, end := os.Args[3], int32(number(os.Args[4])), number(os.Args[5]), number(os.Args[6])
	client, err := kgo.NewClient(
		kgo.SeedBrokers(os.Args[1]),
		kgo.FetchIsolationLevel(isolation),
		kgo.KeepControlRecords(),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {partition: kgo.NewOffset().At(start)}}),
	)
	if err != nil {
		panic(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for next, last := start, time.Now(); next < end; {
		poll, stop := context.WithTimeout(ctx, 3*time.Second)
		fetches := client.PollFetches(poll)
		stop()
		if ctx.Err() != nil {
			panic(ctx.Err())
		}
		for _, failed := range fetches.Errors() {
			if failed.Err != context.DeadlineExceeded {
				panic(failed.Err)
			}
		}
		for _, record := range fetches.Records() {
			next, last = record.Offset+1, time.Now()
			if record.Offset < end && !record.Attrs.IsControl() {
				fmt.Fprintln(out, record.Offset, hex(record.Key), hex(record.Value))
			}
		}
		if time.Since(last) > 5*time.Second {
			break // what is left are aborted records, or offsets that compaction removed
		}
	}
	fmt.Fprintln(out, "end")
}
